"""Backends, their hosts and their instances in the admin."""

from dstackweb.backends.admin import backends, hosts

__all__ = ["backends", "hosts"]
