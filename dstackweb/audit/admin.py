"""The audit log in the admin: entries are never changed."""

from __future__ import annotations

from dstackweb.audit.models import AuditEntry
from dstackweb.lib.admin import register_list

register_list(
    AuditEntry,
    "at actor_name kind name action changes project_name address",
    filters="kind action",
    search="name actor_name project_name address",
    ordering=("-id",),
)
