"""GPU samples, what they add up to, and utilization policies."""
