"""The pages, one room per subject."""
