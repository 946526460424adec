"""Pages for GPUs and utilization policies."""
