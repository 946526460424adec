"""The order of a queue: ranks, moves, positions and settings."""
