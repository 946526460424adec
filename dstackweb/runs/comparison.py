"""Two runs side by side: which settings differ, how long each part took, and how they ended."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import takewhile

from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import NotFound
from dstackweb.runs import selectors
from dstackweb.runs.models import Run
from dstackweb.runs.run_places import placement_summary
from dstackweb.runs.usage import costs_by_run
from dstackweb.spec.effective import EffectiveSpec, flat, value_text

CHANGEABLE = ("priority", "queue", "max_duration_s")
"""Settings that people change after a run was submitted."""
TITLES = ("type", "name")
"""Settings that are not compared."""
MOST_LINES = 5_000
"""Of two texts together; longer ones are not shown line by line, since a page with as many lines takes seconds."""
MOST_STEPS = 20_000_000
"""Texts that may take more steps to compare line by line, a second or so, are shown one after the other."""
CODE_SHOWN = 12


class LineOf(StrEnum):
    """Which run has a line."""

    BOTH = "both"
    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True)
class DiffLine:
    of: LineOf
    text: str


@dataclass(frozen=True)
class ComparedSetting:
    """A setting as text, None where a run lacks it. `lines`: those of both, where texts of 2 to MOST_LINES differ."""

    key: str
    left: str | None
    right: str | None
    lines: list[DiffLine]

    @property
    def differs(self) -> bool:
        return self.left != self.right


@dataclass(frozen=True)
class Side:
    """One of the two. Seconds of its newest attempt, up to now where they go on; None where a part was not reached.

    `place` is where it was placed last, `cost` USD of all attempts.
    """

    run: Run
    place: str
    cost: float
    waited_s: float | None
    starting_s: float | None
    ran_s: float | None
    total_s: float


@dataclass(frozen=True)
class Comparison:
    left: Side
    right: Side
    settings: list[ComparedSetting]


def current_spec(run: Run) -> EffectiveSpec:
    """The settings of a run, with the changes since it was submitted."""
    changes = {"priority": run.priority, "queue": run.queue.name, "max_duration_s": run.limit_s}
    return EffectiveSpec.model_validate(run.spec).model_copy(update=changes)


def previous(run: Run) -> Run | None:
    """The run before it that had the same name."""
    before = Run.objects.select_related("queue", "project", "user").filter(project=run.project_id, name=run.name)
    return before.filter(pk__lt=run.pk).order_by("-id").first()


def find_pair(project: Project, name: str, other: str) -> tuple[Run, Run]:
    """The two runs of these names; without `other` the run before of the same name, and this one. Raises NotFound."""
    run = selectors.find_run(project, name)
    if other:
        return run, selectors.find_run(project, other)
    before = previous(run)
    if before is None:
        raise NotFound(_("no earlier run is called %(run)s. Name the run to compare with") % {"run": repr(run.name)})
    return before, run


def compare(left: Run, right: Run, now: dt.datetime) -> Comparison:
    """Both with queue and user. Settings in the order of the run file's reference, equal ones too."""
    costs = costs_by_run([left, right], now)
    one, other = _settings(left), _settings(right)
    keys = [*one, *(key for key in other if key not in one)]
    return Comparison(
        _side(left, float(costs.get(left.pk, 0)), now),
        _side(right, float(costs.get(right.pk, 0)), now),
        [_setting(key, one.get(key), other.get(key)) for key in keys],
    )


def _settings(run: Run) -> dict[str, str]:
    values = flat(current_spec(run).as_file())
    code = {"code": run.archive.sha256[:CODE_SHOWN]} if run.archive else {}
    return {key: value_text(value) for key, value in values.items() if key not in TITLES} | code


def _setting(key: str, left: str | None, right: str | None) -> ComparedSetting:
    breaks = ((left or "") + (right or "")).count("\n") if left != right else 0
    lines = list(line_by_line(left or "", right or "")) if 0 < breaks < MOST_LINES else []
    return ComparedSetting(key, left, right, lines)


def line_by_line(left: str, right: str) -> Iterator[DiffLine]:
    """The lines of two texts in order: common ones once, and where they differ those of the left one first."""
    one, other = left.splitlines(), right.splitlines()
    begin = _equal_at_begin(one, other)
    end = _equal_at_begin(one[begin:][::-1], other[begin:][::-1])
    yield from (DiffLine(LineOf.BOTH, text) for text in one[:begin])
    yield from _changed_lines(one[begin : len(one) - end], other[begin : len(other) - end])
    yield from (DiffLine(LineOf.BOTH, text) for text in one[len(one) - end :])


def _equal_at_begin(one: list[str], other: list[str]) -> int:
    return sum(1 for _pair in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _changed_lines(one: list[str], other: list[str]) -> Iterator[DiffLine]:
    if _most_steps(one, other) > MOST_STEPS:
        blocks = [("replace", 0, len(one), 0, len(other))]
    else:
        blocks = [*SequenceMatcher(None, one, other, autojunk=False).get_opcodes()]
    for tag, start, end, other_start, other_end in blocks:
        if tag == "equal":
            yield from (DiffLine(LineOf.BOTH, text) for text in one[start:end])
        else:
            yield from (DiffLine(LineOf.LEFT, text) for text in one[start:end])
            yield from (DiffLine(LineOf.RIGHT, text) for text in other[other_start:other_end])


def _most_steps(one: list[str], other: list[str]) -> int:
    """Of the matcher: it looks at all pairs of equal lines, which many repeated ones make many, for each of its blocks,
    of which there are as many as lines at most."""
    times = Counter(other)
    pairs = sum(times[text] for text in one)
    return (len(one) + pairs) * (2 * min(len(one), len(other)) + 1)


def _side(run: Run, cost: float, now: dt.datetime) -> Side:
    jobs = [job for job in selectors.jobs_of(run) if job.attempt == run.attempt]
    placed_at = min((job.placed_at for job in jobs), default=None)
    began_at = min((job.started_at for job in jobs if job.started_at), default=None)
    place = placement_summary(jobs)
    until = run.ended_at or now
    return Side(
        run,
        place.where if place else "",
        cost,
        waited_s=((placed_at or until) - run.queued_at).total_seconds(),
        starting_s=((began_at or until) - placed_at).total_seconds() if placed_at else None,
        ran_s=(until - began_at).total_seconds() if began_at else None,
        total_s=(until - run.submitted_at).total_seconds(),
    )
