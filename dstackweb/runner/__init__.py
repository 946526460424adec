"""The small program beside each job: starts the commands, ships their output, reports the end (docs/runner.md).

Standard library only, so that it runs wherever there is a Python.
"""
