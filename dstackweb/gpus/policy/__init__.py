"""Utilization policies: what they say, how samples are judged by them, and what follows."""
