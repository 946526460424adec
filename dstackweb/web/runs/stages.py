"""The stages of a run: when it was submitted, placed, started and ended, and how long each took or takes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import NamedTuple

from django.utils.translation import gettext as _

from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import ENDED, RunStatus
from dstackweb.wording import statuses, units


class Stage(NamedTuple):
    """A moment of a run, and what follows it: `verb` says what, `took` how long, or `since` when it goes on now."""

    label: str
    at: dt.datetime | None = None
    verb: str = ""
    took: str = ""
    since: dt.datetime | None = None
    status: str = ""

    @property
    def reached(self) -> bool:
        return self.at is not None


def stages(run: Run, jobs: Sequence[Job]) -> list[Stage]:
    """Submitted (or queued again), placed, running, artifacts being sent, and ended: of the newest attempt."""
    mine = [job for job in jobs if job.attempt == run.attempt]
    placed_at = min((job.placed_at for job in mine), default=None)
    began = min((job.started_at for job in mine if job.started_at), default=None)
    sent = _sent_from(run, mine)
    over = run.status in ENDED
    label = statuses.status(run.status).capitalize() if over else _("End")
    return [
        _queued(run, placed_at),
        _stage(_("Placed"), placed_at, began or run.ended_at, _("started in"), _("starting")),
        _stage(_("Running"), began, sent or run.ended_at, _("ran"), _("running")),
        *([Stage(_("Artifacts"), sent, _("being sent"), since=sent)] if sent else []),
        Stage(label, run.ended_at, status=run.status if over else ""),
    ]


def _sent_from(run: Run, jobs: Sequence[Job]) -> dt.datetime | None:
    """When the last commands had ended, while what they left is being sent."""
    if run.ended_at is not None or any(job.exited_at is None and job.ended_at is None for job in jobs):
        return None
    return max((job.exited_at for job in jobs if job.exited_at is not None), default=None)


def _queued(run: Run, placed_at: dt.datetime | None) -> Stage:
    """A pending run is in no queue, and neither was one that ended before a retry began."""
    entered_later = run.queued_at - run.submitted_at > dt.timedelta(seconds=1)
    label, at = (_("Queued"), run.queued_at) if entered_later else (_("Submitted"), run.submitted_at)
    unknown = run.status == RunStatus.PENDING or (placed_at is None and run.ended_at and run.attempt > 1)
    return Stage(label, at) if unknown else _stage(label, at, placed_at or run.ended_at, _("waited"), _("waiting"))


def _stage(label: str, start: dt.datetime | None, end: dt.datetime | None, past: str, present: str) -> Stage:
    if start is None:
        return Stage(label)
    if end is None:
        return Stage(label, start, present, since=start)
    return Stage(label, start, past, units.elapsed((end - start).total_seconds()))


def newest(found: Sequence[Stage]) -> Stage | None:
    """The last stage with a duration: what the run does now, or did last."""
    return next((stage for stage in reversed(found) if stage.verb), None)
