"""Holds, resources for a person to work on for a limited time: runs whose commands print how to connect, and wait."""

from __future__ import annotations

import datetime as dt
import ipaddress
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows, may_change
from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid
from dstackweb.runs import services
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Job, Run
from dstackweb.runs.shared_rows import touch
from dstackweb.runs.states import JobStatus, RunStatus
from dstackweb.runs.transitions import lock_run, record
from dstackweb.spec.units import MAX_DURATION_S, format_duration, parse_duration

MEMBER_MAX_S = 7 * 86_400
"""The longest hold, or extended run, that members may have in all; managers have no limit."""


@dataclass(frozen=True)
class HoldRequest:
    """A requested hold, in the syntax of run files; empty is not given."""

    duration: str
    gpu: str = ""
    cpu: str = ""
    memory: str = ""
    name: str = ""
    queue: str = ""
    priority: int | None = None


def submit_hold(project: Project, user: User, role: str, wanted: HoldRequest, idempotency_key: str = "") -> Run:
    """Submit a hold, which waits in its queue like any run. Raises what `services.submit` raises."""
    time = parse_hold_time(wanted.duration)
    if time > MEMBER_MAX_S and not allows(role, "manager"):
        raise _too_long(time)
    if not (wanted.gpu or wanted.cpu):
        raise Invalid.at("gpu", msg=_("set `gpu`, such as 1 or A100:2, or `cpu`"))
    submission = services.Submission(run_config(wanted, time), hold=True)
    run, _made = services.submit(project, user, role, submission, idempotency_key)
    return run


def run_config(wanted: HoldRequest, seconds: int) -> dict[str, Any]:
    resources = {"gpu": wanted.gpu, "cpu": wanted.cpu, "memory": wanted.memory}
    given = {"name": wanted.name, "queue": wanted.queue, "priority": wanted.priority}
    return {
        "type": "task",
        "commands": [hold_script(seconds)],
        "resources": {key: text for key, text in resources.items() if text},
        "max_duration": format_duration(seconds),
        **{key: value for key, value in given.items() if value not in ("", None)},
    }


def hold_script(seconds: int) -> str:
    """The commands of a hold, for POSIX shells. One sleep: the shell of a loop would leave one behind after TERM."""
    return f"""\
trap 'exit 0' TERM
echo "host   $DSTACK_HOST_NAME${{DSTACK_HOST_ADDRESS:+ ($DSTACK_HOST_ADDRESS)}}"
echo "GPUs   ${{CUDA_VISIBLE_DEVICES:-none}}"
echo "until  $(date -u -d "@$(($(date +%s) + {seconds}))" '+%Y-%m-%d %H:%M UTC' 2>/dev/null || echo 'its time is over')"
echo
case "$DSTACK_HOST_ADDRESS" in
  '' | 127.* | ::1) echo "To use them, in a shell on $DSTACK_HOST_NAME, the machine that dstackweb runs on:" ;;
  *) echo 'To use them:'; echo "  ssh $DSTACK_HOST_ADDRESS" ;;
esac
echo "  export CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"
echo
echo "Extend:  dstackweb extend $DSTACK_RUN_NAME 1h"
echo "Release: dstackweb stop $DSTACK_RUN_NAME"
exec 2>/dev/null
sleep {MAX_DURATION_S} & wait $! || :"""


@dataclass(frozen=True)
class Access:
    """Where a hold is, and how to connect. `here`: on the machine that dstackweb itself runs on."""

    host: str
    address: str
    here: bool
    gpus: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """Shell lines to connect to the host, unless it is this one, and to use the GPUs."""
        export = f"export CUDA_VISIBLE_DEVICES={','.join(self.gpus)}"
        return [export] if self.here else [f"ssh {shlex.quote(self.address)}", export]


def access_to(run: Run, jobs: Sequence[Job]) -> Access | None:
    """How to connect to a running hold; None for any other run. `jobs` are the run's, with their hosts."""
    if not run.is_hold or run.status != RunStatus.RUNNING:
        return None
    for job in jobs:
        if job.attempt == run.attempt and job.status == JobStatus.RUNNING and job.host is not None:
            address = job.host.address
            return Access(job.host.name, address, is_local_address(address), tuple(job.gpus))
    return None


class HoldInfo(NamedTuple):
    user: str
    until: dt.datetime | None


def active_holds(run_ids: Iterable[int]) -> dict[int, HoldInfo]:
    """The holds among these runs, by run id, for lists that load no specs."""
    found = Run.objects.filter(pk__in=set(run_ids), spec__hold=True).select_related("user")
    return {run.pk: HoldInfo(run.user.get_username(), run.held_until) for run in found}


def is_local_address(address: str) -> bool:
    """Whether a host's address is empty or loopback, so that it is the machine dstackweb runs on."""
    try:
        return not address or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def extend(run: Run, user: User, role: str, duration: str) -> Run:
    """Extend the time of a placed run by `duration`; its runner gets the new limit with its next heartbeat.

    Raises Forbidden for another member's run, Invalid for an invalid or too long time, and Conflict for a run without
    limit, not placed, or ending.
    """
    if not may_change(role, run.user_id, user):
        raise Forbidden(
            _("run %(run)s belongs to %(user)s: only they or a manager can extend it")
            % {"run": run.name, "user": run.user.get_username()}
        )
    more = parse_hold_time(duration)
    with transaction.atomic():
        fresh = lock_run(run.pk)
        total = _new_limit_s(fresh, more)
        if total > MEMBER_MAX_S and not allows(role, "manager"):
            raise _too_long(total)
        if total > MAX_DURATION_S:
            raise Invalid.at(
                "for",
                msg=_("a run may last %(max_duration_s)s days at most") % {"max_duration_s": MAX_DURATION_S // 86_400},
            )
        Run.objects.filter(pk=fresh.pk).update(extended_s=F("extended_s") + more)
        record(fresh, RunEventKind.EXTENDED, {"by_s": more, "total_s": total}, actor=user)
        touch(fresh.queue_id)
    return Run.objects.select_related("queue", "project", "user").get(pk=run.pk)


def _new_limit_s(run: Run, more: int) -> int:
    """A run's new limit in seconds, with `more` added. Raises Conflict if it cannot be extended."""
    if run.limit_s is None:
        raise Conflict(_("run %(run)s has no max_duration to extend") % {"run": run.name})
    if run.status not in (RunStatus.PROVISIONING, RunStatus.RUNNING):
        raise Conflict(
            _("run %(run)s is %(status)s: only provisioning and running runs can be extended")
            % {"run": run.name, "status": run.status}
        )
    started = run.jobs.filter(attempt=run.attempt, started_at__isnull=False).order_by("started_at").first()
    if started is not None and started.started_at is not None:
        ends = started.started_at + dt.timedelta(seconds=run.limit_s)
        # The runner enforces the limit itself, and learns of more time only with a heartbeat.
        if ends - timezone.now() < dt.timedelta(seconds=2 * settings.DSTACKWEB_HEARTBEAT_S):
            raise Conflict(_("the time of run %(run)s is over, it is ending") % {"run": run.name})
    return run.limit_s + more


def parse_hold_time(duration: str) -> int:
    """Seconds of a duration such as `3h`. Raises Invalid."""
    try:
        found = parse_duration(duration)
    except ValueError as error:
        raise Invalid.at("for", msg=_("`for` must be a duration such as 3h: %(error)s") % {"error": error}) from None
    if found < 1:
        raise Invalid.at("for", msg=_("`for` must be a duration of at least 1 s, such as 3h"))
    return found


def _too_long(seconds: int) -> Invalid:
    most, time = MEMBER_MAX_S // 86_400, format_duration(seconds)
    return Invalid.at(
        "for",
        msg=_("members may hold or extend a run for %(most)s days in all, not %(time)s. Ask a manager")
        % {"most": most, "time": time},
    )
