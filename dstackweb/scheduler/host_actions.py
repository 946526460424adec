"""What deployment admins do about a host that is held back, or whose machine is gone."""

from __future__ import annotations

from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import User
from dstackweb.backends.hosts import inventory
from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Host, HostEvent, HostEventKind
from dstackweb.lib.errors import Conflict, Invalid
from dstackweb.runs import wakeups
from dstackweb.runs.attempts import end_job, return_job
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, Reason

MAX_REASON = 300
"""Characters."""


def take_jobs_again(host: Host, by: User) -> bool:
    """Place jobs on a host that is held back because starts failed. False if it was not held back."""
    cleared = inventory.clear_failed_starts(host.pk, timezone.now(), by=by)
    if cleared:
        wakeups.request_pass()
    host.refresh_from_db()
    return cleared


def declare_gone(host: Host, by: User, reason: str) -> int:
    """End all jobs of a host whose machine will not come back, and free what they held; returns how many.

    Runs end, are retried or go back to the queue as after any other loss. A job's runner that does come back is
    refused, and stops its commands. Raises Invalid without a reason, Conflict while the host is online: its jobs may
    still use its GPUs.
    """
    reason = reason.strip()
    if not reason:
        raise Invalid.at("reason", msg=_("say how you know that the machine is gone"))
    if len(reason) > MAX_REASON:
        raise Invalid.at("reason", msg=_("at most %(max_reason)s characters") % {"max_reason": MAX_REASON})
    host.refresh_from_db()
    if is_online(host):
        raise Conflict(
            _("%(host)s is online, so its jobs may still use its GPUs. Stop their runs instead") % {"host": host.name}
        )
    detail = {"code": MessageCode.GIVEN_UP, "host": host.name, "by": by.username, "reason": reason}
    ended = 0
    for job_id in Job.objects.filter(host=host, status__in=JOB_ACTIVE).order_by("pk").values_list("pk", flat=True):
        ended += return_job(job_id, detail=detail) or end_job(job_id, Reason.INSTANCE_UNREACHABLE, detail=detail)
    data = {"reason": reason, "jobs": ended}
    HostEvent.objects.create(host=host, kind=HostEventKind.GONE, actor=by, data=data)
    return ended
