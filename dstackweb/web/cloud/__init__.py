"""Pages for offers, quotas and cloud instances."""
