"""The issue's measure: after 20,000 tasks in 5,000 groups, the kept counters equal the Dask scheduler's own."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster, wait

from dstackweb.accounts.models import Project
from dstackweb.progress import recount, selectors
from dstackweb.progress.models import Scope, TaskFailure, TaskGroup, TaskPrefix
from dstackweb.progress.states import AS_REPORTED, TaskState, folded
from dstackweb.runs.launch import tasks_token
from dstackweb.runs.models import Run
from dstackweb.tracking.dask import watch
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.support import eventually
from tests.tracking.test_dask import own

pytestmark = pytest.mark.nightly

GROUPS = 5_000
TASKS = 4
PREFIXES = ("load", "clean", "augment", "train", "score")


@pytest.fixture
def run(transactional_db: None) -> Run:
    project: Project = make_project("main")
    make_host()
    run = make_run(project, join(project, make_user("ada")), "search")
    place_all()
    start(placed_job(run))
    return Run.objects.get(pk=run.pk)


@pytest.fixture
def client(run: Run, live_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Of a cluster whose tasks are the run's."""
    monkeypatch.setenv("DSTACKWEB_TASKS_URL", f"{live_server.url}/api/v1/projects/main/runs/{run.uid}/tasks")
    monkeypatch.setenv("DSTACKWEB_TASKS_TOKEN", tasks_token(placed_job(run).pk))
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None, silence_logs=logging.CRITICAL
        ) as cluster,
        Client(cluster) as client,
    ):
        watch(client)
        yield client


def kept(run: Run) -> dict[str, dict[str, int]]:
    """What the server counts, by prefix, in Dask's states."""
    return {row.name: states_of(row) for row in TaskPrefix.objects.filter(scope__run_id=run.pk)}


def states_of(row: TaskPrefix | TaskGroup) -> dict[str, int]:
    counts = {state: getattr(row, state) for state in TaskState}
    return {state.value: n for state, n in folded(counts, AS_REPORTED).items() if n}


def by_group(run: Run) -> dict[str, dict[str, int]]:
    """What the server counts of each group that has tasks which are not forgotten."""
    rows = TaskGroup.objects.filter(prefix__scope__run_id=run.pk)
    return {row.name: states for row in rows if (states := states_of(row)).keys() - {"forgotten"}}


class Once:
    """Fails the first time that it is called with a number."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()

    def __call__(self, i: int) -> int:
        self.seen[i] += 1
        if i % 100 == 1 and self.seen[i] == 1:
            raise OSError("try again")
        if i % 200 == 2:
            raise ValueError(f"{i} never works")
        return i


SEEN = Once()


def task(i: int) -> int:
    return SEEN(i)


def test_after_20_000_tasks_in_5_000_groups_the_counters_are_the_schedulers(run: Run, client: Client) -> None:
    scheduler: Any = client.cluster.scheduler
    groups = [f"{PREFIXES[i % len(PREFIXES)]}-{uuid.uuid4().hex}" for i in range(GROUPS)]
    keys = [(group, n) for group in groups for n in range(TASKS)]
    futures = client.map(task, range(len(keys)), key=keys, retries=1)
    wait(futures)
    failed = {str(future.key) for future in futures if future.status == "error"}
    assert len(failed) == GROUPS * TASKS // 200

    def same() -> bool:
        return kept(run) == own(scheduler)

    eventually(same, deadline=60)
    assert len(by_group(run)) == GROUPS
    assert by_group(run) == {
        name: {state: n for state, n in group.states.items() if n} for name, group in scheduler.task_groups.items()
    }
    assert set(TaskFailure.objects.filter(scope__run_id=run.pk).values_list("key", flat=True)) == failed
    scope = Scope.objects.get(run_id=run.pk)
    assert scope.total == GROUPS * TASKS
    assert scope.duration_n == GROUPS * TASKS - len(failed)

    del futures[: len(futures) // 2]
    eventually(lambda: own(scheduler)["load"].get("forgotten") == GROUPS * TASKS // 10)
    eventually(same, deadline=60)
    assert len(by_group(run)) == GROUPS // 2
    again = client.map(task, range(3, 100_003, 1000), key=[(group, 0) for group in groups[:100]])
    wait(again)
    eventually(same, deadline=60)
    assert len(by_group(run)) == GROUPS // 2 + 100
    assert Scope.objects.get(run_id=run.pk).total == GROUPS * TASKS + 100
    assert list(recount.differences()) == []


def test_after_the_end_the_outcome_of_each_task_is_known(run: Run, client: Client) -> None:
    """As in examples/dask.yaml: some scores fail, then the program drops everything and ends."""
    loaded = client.map(work, range(60), key=[f"load-{i}" for i in range(60)])
    scores = client.map(score, loaded, key=[f"score-{i}" for i in range(60)])
    wait(scores)
    failed = sum(future.status == "error" for future in scores)
    assert failed == 3
    del loaded, scores
    client.close()
    client.cluster.close()

    def ended() -> dict[str, tuple[int, int, int]]:
        rows = TaskPrefix.objects.filter(scope__run_id=run.pk)
        return {row.name: (row.total, row.forgotten_done, row.forgotten_failed) for row in rows}

    eventually(lambda: ended() == {"load": (60, 60, 0), "score": (60, 57, 3)})
    totals, [first, second], _ = selectors.prefixes(Scope.objects.get(run_id=run.pk).pk, 0, order="failed")
    assert totals is not None
    assert (totals.bar.counts["memory"], totals.bar.counts["erred"]) == (117, 3)  # type: ignore[index]  # by value
    assert (first.name, second.name) == ("score", "load")
    assert [group.name for group in selectors.groups(first.id, only="failed")[0]] == ["score"]
    assert list(recount.differences()) == []


def work(i: int) -> int:
    return i


def score(i: int) -> int:
    if i % 20 == 7:
        raise ValueError(f"file {i} has no labels")
    return i
