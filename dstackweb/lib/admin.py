"""Locks across processes in the admin, read-only."""

from __future__ import annotations

from dstackweb.lib.models import Lease
from dstackweb.lib.pages import register_list

register_list(Lease, "name holder expires_at", search="name holder")
