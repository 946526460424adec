"""Locks across processes in the admin, read-only."""

from __future__ import annotations

from django.contrib import admin

from dstackweb.lib.models import Lease
from dstackweb.lib.pages import ReadOnly


@admin.register(Lease)
class LeaseAdmin(ReadOnly):
    list_display = ("name", "holder", "expires_at")
    search_fields = ("name", "holder")
