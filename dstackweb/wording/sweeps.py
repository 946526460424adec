"""Words of sweeps: how many of their runs are where, and why an index has no run."""

from __future__ import annotations

from django.utils.translation import gettext as _, gettext_lazy, ngettext

from dstackweb.runs.codes import NoRun
from dstackweb.runs.models import Sweep
from dstackweb.runs.states import RunStatus
from dstackweb.runs.sweeps.selectors import SweepCounts
from dstackweb.wording import statuses
from dstackweb.wording.sentence import words

no_run = words(
    {
        NoRun.TO_COME: gettext_lazy("to come"),
        NoRun.DROPPED: gettext_lazy("never started"),
        NoRun.REMOVED: gettext_lazy("removed"),
    }
)


def outcome(status: RunStatus | NoRun) -> str:
    """The status of an index of a sweep."""
    return str(no_run(status)) if isinstance(status, NoRun) else str(statuses.status(status))


def counts(of: SweepCounts) -> str:
    """`4 running · 10 done · 2 failed · 9,984 to come`."""
    worded = (
        (_("%s running"), of.running),
        (_("%s waiting"), of.waiting),
        (_("%s done"), of.done),
        (_("%s failed"), of.failed),
        (_("%s terminated"), of.terminated),
        (_("%s to come"), of.left),
        (_("%s never started"), of.dropped),
        (_("%s removed"), of.removed),
    )
    return " · ".join(text % f"{number:,}" for text, number in worded if number)


def stops(active: int, left: int) -> str:
    """What stopping a sweep does."""
    stopped = ngettext("%d active run is stopped", "%d active runs are stopped", active) % active
    if not left:
        return _("%s.") % stopped
    return _("%(stopped)s, %(never)s.") % {
        "stopped": stopped,
        "never": ngettext("%d never starts", "%d never start", left) % left,
    }


def size(runs: int, max_parallel: int | None) -> str:
    """`20 runs, at most 4 at once`."""
    text = ngettext("%d run", "%d runs", runs) % runs
    if max_parallel is None:
        return text
    return _("%(runs)s, at most %(most)d at once") % {"runs": text, "most": max_parallel}


def state(sweep: Sweep) -> str:
    """What people need to know beside its counts; empty if nothing."""
    if sweep.status_detail:
        text = statuses.after(sweep.status_detail)
        return text if sweep.is_pending else _("Canceled: %s") % text
    if sweep.waits_for_name:
        return _("Waits until the other run called %s has ended.") % sweep.waits_for_name
    if sweep.stopped_at is None:
        return ""
    if sweep.stopped_by is None:
        return _("Stopped: %s may not submit runs any more.") % sweep.user.get_username()
    return _("Stopped by %s.") % sweep.stopped_by.get_username()
