"""Helpers that know nothing of runs."""
