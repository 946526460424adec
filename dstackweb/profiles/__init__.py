"""Profiles: named defaults for runs, edited by admins."""
