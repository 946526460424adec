"""A scan yields the runs of a queue in order, whichever shapes are blocked on the way."""

from __future__ import annotations

import random

import pytest
from pytest_django import DjangoAssertNumQueries

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Run
from dstackweb.runs.services import ensure_queue
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.passes import loading, queue_scan
from dstackweb.scheduler.passes.queue_scan import QueueScan
from dstackweb.spec.effective import EffectiveSpec
from tests.factories import make_run

pytestmark = pytest.mark.django_db


def waiting(project: Project, member: User, places: list[tuple[int, str]]) -> list[Run]:
    """Runs of these ranks and shapes, in the order of the queue."""
    pattern = make_run(project, member)
    queue = pattern.queue
    Run.objects.all().delete()
    Run.objects.bulk_create(
        Run(
            project=project, queue=queue, user=member, name=f"run-{index}", spec=pattern.spec,
            seniority_us=rank, rank=rank, shape=shape,
        )
        for index, (rank, shape) in enumerate(places)
    )  # fmt: skip
    return list(Run.objects.order_by("rank", "id"))


@pytest.mark.parametrize("seed", range(12))
def test_runs_are_scanned_in_order_until_their_shape_is_blocked(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """R23."""
    rnd = random.Random(seed)
    monkeypatch.setattr(queue_scan, "BATCH", rnd.choice([1, 2, 3, 50]))
    places = [(rnd.randint(-5, 5), rnd.choice("abcdef")) for _ in range(rnd.randint(0, 40))]
    runs = waiting(project, member, places)
    blocks = {run.pk for run in runs if rnd.random() < 0.2}
    expected, blocked = [], set()
    for run in runs:
        if run.shape not in blocked:
            expected.append(run.pk)
            blocked |= {run.shape} if run.pk in blocks else set()
    scan, seen = QueueScan(ensure_queue(project)), []
    while (head := scan.head()) is not None:
        assert scan.head() is head
        assert scan.spec(head) is not None
        seen.append(head.pk)
        if head.pk in blocks:
            scan.block(head.shape)
        else:
            scan.pop()
    assert seen == expected


def test_a_run_stopped_before_it_is_reached_is_skipped(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_scan, "BATCH", 1)
    blocked, stopped, behind, other = waiting(project, member, [(1, "a"), (2, "b"), (3, "b"), (4, "c")])
    scan = QueueScan(ensure_queue(project))
    assert scan.head() == blocked
    scan.block("a")
    real = queue_scan.heads_of_shapes

    def heads(*args: object) -> list[tuple[int, int, str]]:
        found = real(*args)
        Run.objects.filter(pk=stopped.pk).update(status=RunStatus.TERMINATED)
        return found

    monkeypatch.setattr(queue_scan, "heads_of_shapes", heads)
    assert scan.head() == behind
    scan.pop()
    assert scan.head() == other


@pytest.mark.parametrize("size", [10, 300])
def test_a_run_behind_many_that_fit_nowhere_costs_the_same_however_many_they_are(
    project: Project, member: User, django_assert_num_queries: DjangoAssertNumQueries, size: int
) -> None:
    runs = waiting(project, member, [*((index, "ab"[index % 2]) for index in range(size)), (size, "c")])
    scan = QueueScan(ensure_queue(project))
    with django_assert_num_queries(3 if size > queue_scan.BATCH else 1):
        for shape in "ab":
            assert scan.head().shape == shape
            scan.block(shape)
        assert scan.head() == runs[-1]


def test_each_spec_is_read_once_where_shapes_are_more_than_are_kept(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a pass over runs that all differ would take the square of their number, and hold all other projects up."""
    monkeypatch.setattr(queue_scan, "BATCH", 2)
    monkeypatch.setattr(queue_scan, "MAX_KEPT", 6)
    queue_scan._specs.clear()
    read: list[object] = []

    class Counted:
        @staticmethod
        def model_validate(stored: dict[str, object]) -> EffectiveSpec:
            read.append(stored)
            return EffectiveSpec.model_validate(stored)

    runs = waiting(project, member, [(index, f"shape-{index:02}") for index in range(60)])
    monkeypatch.setattr(loading, "EffectiveSpec", Counted)
    scan, seen = QueueScan(ensure_queue(project)), []
    while (head := scan.head()) is not None:
        assert scan.spec(head) is not None
        seen.append(head)
        scan.block(head.shape)
    assert seen == runs
    assert len(read) == len(runs)
    assert len(queue_scan._specs) <= 6


def test_kept_specs_lack_what_decides_nothing(project: Project, member: User) -> None:
    """A member's thousands of runs, each with commands of 256 KB, would fill the worker's memory."""
    make_run(project, member, commands=["x" * 1000], env={"A": "y" * 1000}, working_dir="z" * 1000)
    queue_scan._specs.clear()
    scan = QueueScan(ensure_queue(project))
    run = scan.head()
    assert run is not None
    spec = scan.spec(run)
    assert spec is not None
    assert len(spec.model_dump_json()) < 1500
    stored = EffectiveSpec.model_validate(Run.objects.get().spec)
    assert spec.shape_key(member.pk) == stored.shape_key(member.pk) == run.shape
