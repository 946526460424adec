"""Sweeps: many runs of one file, created a few at a time.

A sweep's row is written with its queue locked. How many of its runs are in each status is counted with their moves.
"""
