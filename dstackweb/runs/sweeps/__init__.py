"""Sweeps: many runs of one file, created a few at a time. `window` decides, `creation` creates.

Whoever writes a sweep's row has locked its queue. How many of its runs are in each status is counted with their moves.
"""
