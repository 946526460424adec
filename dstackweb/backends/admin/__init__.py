"""Backends, their hosts and their instances in the admin."""

from dstackweb.backends.admin import backends, hosts, instances

__all__ = ["backends", "hosts", "instances"]
