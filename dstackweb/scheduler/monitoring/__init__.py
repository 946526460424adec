"""Watches placed runs and hosts: silence, deadlines, retries, GPU use, tasks of ended attempts."""
