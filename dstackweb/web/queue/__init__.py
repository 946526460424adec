"""Pages for queues: order, moves, settings."""
