"""Reporting from user code: what a program does, task by task, to the progress pages. Standard library only."""
