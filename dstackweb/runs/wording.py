"""The words for codes and numbers: the one place where statuses, reasons and events become sentences (DESIGN 3.11).

Every function takes what is stored and returns text in the reader's language; an unknown code is shown as it is, so
that a newer server's event is still told.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dstackweb.backends.contract import Offer


class Told(NamedTuple):
    """A short word for a badge, a sentence for beside it, and a tone: `go`, `wait`, `bad` or `info`."""

    label: str
    text: str
    tone: str = "wait"


def duration(seconds: float | None) -> str:
    """Seconds as `12 s`, `4 min`, `2 h 05`, `1 d 2 h`. app.js says the same."""
    if seconds is None:
        return "–"
    s = max(0, math.floor(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02d}"
    hours = s % 86400 // 3600
    return f"{s // 86400} d {hours} h" if hours else f"{s // 86400} d"


def mebibytes(mib: int | None) -> str:
    """Memory with the unit that fits: `512 MB`, `80 GB`, `1.5 TB`."""
    if mib is None:
        return "–"
    if mib < 1024:
        return f"{mib} MB"
    amount, unit = (mib / 1024, "GB") if mib < 1024 * 1024 else (mib / 1024 / 1024, "TB")
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def gpus(count: int) -> str:
    """`1 GPU`, `4 GPUs`."""
    return ngettext("%d GPU", "%d GPUs", count) % count


def cpus(count: int) -> str:
    """`1 CPU`, `8 CPUs`."""
    return ngettext("%d CPU", "%d CPUs", count) % count


def status(code: str) -> str:
    """A run's or job's status; dstack's own words, which the API and the command line use as well."""
    return {
        "pending": _("pending"),
        "submitted": _("submitted"),
        "provisioning": _("provisioning"),
        "running": _("running"),
        "terminating": _("terminating"),
        "done": _("done"),
        "failed": _("failed"),
        "terminated": _("terminated"),
    }.get(code, code)


def termination(code: str) -> str:
    """Why a run or a job ended, as a sentence."""
    return {
        "all_jobs_done": _("All commands finished."),
        "job_failed": _("A job failed."),
        "stopped_by_user": _("Stopped by a member."),
        "aborted_by_user": _("Aborted by a member."),
        "retry_limit_exceeded": _("It failed again after the time for retries had passed."),
        "server_error": _("The server could not go on with it."),
        "done_by_runner": _("All commands finished."),
        "container_exited_with_error": _("A command failed."),
        "terminated_by_user": _("Stopped by a member."),
        "terminated_by_server": _("Stopped because another node of the run ended."),
        "max_duration_exceeded": _("It ran longer than its max_duration."),
        "executor_error": _("Its runner failed."),
        "instance_unreachable": _("It was interrupted: its host or its runner went away."),
        "failed_to_start_due_to_no_capacity": _("It could not be started on its host in time."),
        "out_of_capacity": _("No cloud had a machine for it."),
        "interrupted_by_no_capacity": _("It was interrupted: the cloud took its spot machine back."),
        "creating_container_error": _("Its container could not be created."),
        "log_quota_exceeded": _("It wrote more log than is allowed."),
        "hold_ended": _("Held for its time, and given back."),
        "given_back": _("Given back before its time was over."),
        "terminated_due_to_utilization_policy": _("Stopped by the utilization policy: its GPUs were not used enough."),
    }.get(code, code)


def no_machine(code: str) -> str:
    """Why a cloud's machine was not to be had, or has ended, after its name and a colon."""
    return {
        "no_capacity": _("the cloud has none now"),
        "quota": _("the account's quota is used up"),
        "spot_price": _("spot machines cost more than is paid for them now"),
        "not_allowed": _("the backend's credentials don't allow it"),
        "ami": _("there is no image for it"),
        "network": _("its network can't be used"),
        "refused": _("the cloud refused"),
        "not_started": _("it did not come up in time"),
        "no_gpus": _("it shows fewer GPUs than it has; its image needs NVIDIA's driver"),
        "interrupted": _("the cloud took it back"),
        "cloud": _("it ended by itself, or somebody ended it at the cloud"),
        "unreachable": _("the cloud could not be asked"),
        "silent": _("it has not called for too long"),
        "overdue": _("its job did not stop in time"),
        "finished": _("its work is done"),
        "idle": _("nothing was left for it to do"),
        "stopped": _("it was ended by hand"),
        "deleted": _("its backend was deleted"),
    }.get(code, code)


def exited(code: int) -> str:
    """An exit code, with what it usually means where it has a usual meaning."""
    usual = {
        126: _("the command can't be executed"),
        127: _("command not found"),
        130: _("interrupted"),
        137: _("killed; often out of memory"),
        139: _("crashed: segmentation fault"),
        143: _("terminated"),
    }.get(code)
    text = _("Exit code %d") % code
    return f"{text}: {usual}." if usual else f"{text}."


def dollars(amount: object) -> str:
    """`$12.50`."""
    return f"${Decimal(str(amount)):.2f}"


def moment(iso: str) -> str:
    """A stored time as `18:40 UTC`, with the day where it isn't today."""
    at, today = dt.datetime.fromisoformat(iso).astimezone(dt.UTC), timezone.now().astimezone(dt.UTC).date()
    return f"{at:%H:%M} UTC" if at.date() == today else f"{at:%Y-%m-%d %H:%M} UTC"


_MOMENT = re.compile(r"(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d) UTC")


def moments(text: str) -> Iterator[tuple[str, dt.datetime | None]]:
    """A sentence cut at its moments: each piece, and the time that it stands for where it is one of `moment`."""
    at = 0
    for found in _MOMENT.finditer(text):
        yield text[at : found.start()], None
        day = found[1] or f"{timezone.now().astimezone(dt.UTC):%Y-%m-%d}"
        try:
            yield found[0], dt.datetime.fromisoformat(f"{day} {found[2]}+00:00")
        except ValueError:  # somebody's own words that look like one
            yield found[0], None
        at = found.end()
    yield text[at:], None


def has(offer: Offer) -> str:
    """All that the place of an offer has: `4 × A100-SXM4-80GB · 64 CPUs · 512 GB`."""
    gpu = f"{offer.gpu_count} × {offer.gpu_name.removeprefix('NVIDIA ')}" if offer.gpu_count else ""
    return " · ".join(filter(None, (gpu, cpus(offer.cpus), mebibytes(offer.memory_mib))))


def availability(code: str) -> Told:
    """An offer's availability as a badge."""
    tones = {"available": "go", "idle": "go", "no_quota": "bad", "not_available": "bad"}
    return Told(code.replace("_", " "), "", tones.get(code, "wait"))


def isolation(code: str) -> str:
    """How a host keeps jobs apart from the server."""
    return {
        "user": _("jobs run as another user"),
        "container": _("jobs run in containers"),
        "shared": _("none: jobs share the server's user"),
        "none": _("none: jobs are refused"),
    }.get(code, code)
