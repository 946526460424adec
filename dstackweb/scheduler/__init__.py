"""Decides where waiting runs go, starts them, and watches what was placed."""
