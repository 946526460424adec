"""The scheduler's own rows in the admin: to see that work is done, not to write."""

from __future__ import annotations

from django.contrib import admin

from dstackweb.lib.models import Watch
from dstackweb.lib.pages import ReadOnly
from dstackweb.scheduler.models import PassState, PeriodicJob, Retention


@admin.register(PeriodicJob)
class PeriodicJobAdmin(ReadOnly):
    list_display = ("name", "due_at", "last_started_at", "last_ended_at", "outstanding_until", "last_error")
    search_fields = ("name",)


@admin.register(PassState)
class PassStateAdmin(ReadOnly):
    list_display = ("generation", "ended_at", "duration_ms", "placed", "expires_at")


@admin.register(Watch)
class WatchAdmin(ReadOnly):
    list_display = ("counted_s", "checks")


@admin.register(Retention)
class RetentionAdmin(ReadOnly):
    list_display = ("kind", "host", "waiting", "behind_since", "pruned", "pruned_at", "at")
