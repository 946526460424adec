"""A deployment whose parts die: `make chaos` (docs/performance.md)."""
