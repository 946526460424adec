"""The small program beside each job: starts the commands, ships their output, reports the end (docs/runner.md).

Standard library only and nothing newer than Python 3.9, so that it runs wherever there is a Python.
"""
