"""The page of a queue's past: wait times and queue lengths."""
