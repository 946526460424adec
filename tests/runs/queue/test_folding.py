"""The waiting runs of a sweep are one line, and every line has the position that its run has in the queue."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.runs import rows
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import reorder
from dstackweb.runs.queue.folding import FoldKey, fold
from dstackweb.runs.queue.listing import folding_of, page_of, runs_of
from dstackweb.runs.queue.move_preview import MoveTarget
from dstackweb.runs.row_fields import QueueExportRow
from dstackweb.runs.sweeps import services as sweeps
from tests.factories import make_run
from tests.runs.sweeps.test_sweeps import make_sweep

NOW = dt.datetime(2026, 11, 26, 14, 0, 0, 123457, tzinfo=dt.UTC)
KEYS = st.builds(FoldKey.of, st.integers(1, 4), st.integers(50, 51), st.sampled_from([None, NOW]))
QUEUES = st.lists(st.one_of(st.none(), KEYS), max_size=30)
"""Waiting runs in order: those of a sweep have the key of their fold."""


@given(KEYS)
def test_a_key_is_read_from_its_text(key: FoldKey) -> None:
    assert FoldKey.parse(str(key)) == key
    assert key.moved_at in (None, NOW)


@pytest.mark.parametrize("text", ["", "12", "s", "s1", "s1p", "sp5", "s1p50m3", "s1m" + "9" * 18, "s1p٣", "12.ab"])
def test_other_texts_are_no_key(text: str) -> None:
    assert FoldKey.parse(text) is None


@given(QUEUES, st.frozensets(st.integers(1, 4)))
def test_lines_and_positions_are_those_of_a_walk_through_the_queue(
    queue: list[FoldKey | None], opened: frozenset[int]
) -> None:
    places = [(-1000 + 3 * at, at) for at in range(len(queue))]
    found = fold([(place, key) for place, key in zip(places, queue, strict=True) if key is not None], opened)
    seen: dict[FoldKey, int] = {}
    lines: dict[int, int] = {}
    for at, key in enumerate(queue):
        if key is None or key.sweep_id in opened:
            lines[at] = 1
        elif key in seen:
            lines[seen[key]] += 1
        else:
            seen[key] = at
            lines[at] = 1
    assert found.lines_of(range(len(queue))) == found.stands_for(lines) == lines
    assert sum(lines.values()) == len(queue)
    assert len(queue) - len(found.hidden) == len(lines)
    assert [found.position(line, places[at]) for line, at in enumerate(lines)] == [at + 1 for at in lines]


def lines(queue: Queue, opened: set[int] | None = None, limit: int = 50, offset: int = 0) -> list[tuple[str, int, int]]:
    """The name of each line's run, its position, and for how many runs it stands."""
    folding = folding_of(queue, opened or ())
    assert folding is not None
    positions = page_of(queue, folding, limit, offset)
    runs = folding.stands_for(positions)
    shown = rows.queue_rows_at(queue, positions, kind=QueueExportRow)
    return [(row.name, row.position, runs[row.pk]) for row in shown]


@pytest.mark.django_db
@pytest.mark.both_sides
class TestRows:
    def test_a_sweep_is_one_line_and_those_behind_it_keep_their_positions(self, project: Project, member: User) -> None:
        make_run(project, member, "first")
        sweep = make_sweep(project, member, 10_000)
        make_run(project, member, "last")
        queue = sweep.queue
        assert lines(queue) == [("first", 1, 1), ("lr-0", 2, 100), ("last", 102, 1)]
        assert lines(queue, offset=1, limit=1) == [("lr-0", 2, 100)]
        assert lines(queue, offset=2) == [("last", 102, 1)]

    def test_an_opened_one_has_its_runs_in_their_places(self, project: Project, member: User) -> None:
        one, two = make_sweep(project, member, 3, name="one"), make_sweep(project, member, 2, name="two")
        assert lines(one.queue, {one.pk}) == [("one-0", 1, 1), ("one-1", 2, 1), ("one-2", 3, 1), ("two-0", 4, 2)]
        assert lines(one.queue, {one.pk, two.pk})[3:] == [("two-0", 4, 1), ("two-1", 5, 1)]

    def test_runs_that_were_changed_by_themselves_are_lines_and_those_moved_together_are_one(
        self, project: Project, member: User
    ) -> None:
        sweep = make_sweep(project, member, 6)
        runs = {run.name: run for run in Run.objects.select_related("queue", "project", "user")}
        reorder.set_priorities([runs["lr-5"]], member, "manager", 60)
        reorder.move([runs["lr-3"], runs["lr-4"]], member, "manager", MoveTarget("top"))
        assert lines(sweep.queue) == [("lr-3", 1, 2), ("lr-5", 3, 1), ("lr-0", 4, 3)]
        folding = folding_of(sweep.queue)
        assert folding is not None
        first = next(iter(folding.heads.values()))
        assert [run.name for run in runs_of(sweep.queue, first)] == ["lr-3", "lr-4"]

    def test_nothing_is_folded_where_no_line_stands_for_several(self, project: Project, member: User) -> None:
        make_run(project, member, "alone")
        sweep = make_sweep(project, member, {"count": 3, "max_parallel": 1})
        assert folding_of(sweep.queue) is None
        sweeps.stop(sweep, member, "member")
        assert folding_of(sweep.queue) is None
