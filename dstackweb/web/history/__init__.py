"""History pages: wait times and queue lengths."""
