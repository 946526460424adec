"""The scheduler's own rows and locks across processes in the admin: to see that work is done, not to write."""

from __future__ import annotations

from dstackweb.lib.admin import register_list
from dstackweb.lib.models import Lease, Watch
from dstackweb.scheduler.models import PassState, PeriodicJob, Retention

register_list(PeriodicJob, "name due_at last_started_at last_ended_at outstanding_until last_error", search="name")
register_list(PassState, "generation ended_at duration_ms placed expires_at")
register_list(Watch, "counted_s checks")
register_list(Retention, "kind host waiting behind_since pruned pruned_at at")
register_list(Lease, "name holder expires_at", search="name holder")
