"""Pages for the progress of tasks."""
