"""The process by which people reach their dev environments: SSH, and pages of their own origin.

Runners connect to it (`runner.tunnel`), so that hosts need no open port. It decides nothing about runs.
"""
