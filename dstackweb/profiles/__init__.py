"""Profiles: named, admin-edited defaults for runs."""
