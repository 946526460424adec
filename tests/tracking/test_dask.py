"""A real Dask cluster's counters on a page: equal to its scheduler's own, whatever happened to its tasks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster, wait

from dstackweb.progress.states import AS_REPORTED, TaskState
from dstackweb.tracking import sender
from dstackweb.tracking.dask import watch
from dstackweb.tracking.sender import Sender
from tests.support import REPO, eventually
from tests.tracking.ear import Ear

pytestmark = pytest.mark.nightly


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


def own(scheduler: Any) -> dict[str, dict[str, int]]:
    """The scheduler's counts by prefix. Its groups lose what is forgotten; its prefixes remember how often that was."""
    found = {}
    for name, prefix in list(scheduler.task_prefixes.items()):
        counts = {**prefix.states, "forgotten": prefix.state_counts["forgotten"]}
        found[name] = {state.replace("-", "_"): n for state, n in counts.items() if n}
    return found


def sums(ear: Ear) -> dict[str, dict[str, int]]:
    """Tasks by prefix and state, of all reporters together."""
    prefixes = {count["prefix"] for body in list(ear.bodies) for count in body.get("counts", [])}
    return {prefix: ear.counts(prefix) for prefix in prefixes}


def same(ear: Ear, cluster: LocalCluster, **prefixes: dict[str, int]) -> None:
    """Wait until the page says what the scheduler says, and of these prefixes so, with how their tasks ended."""
    eventually(lambda: plain(shown := sums(ear)) == own(cluster.scheduler) and shown == shown | prefixes)


def plain(shown: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The states that Dask knows: without how tasks ended that it dropped."""
    found: dict[str, Counter[str]] = {prefix: Counter() for prefix in shown}
    for prefix, states in shown.items():
        for state, n in states.items():
            found[prefix][AS_REPORTED.get(TaskState(state), state)] += n
    return {prefix: dict(states) for prefix, states in found.items()}


def work(i: int) -> int:
    return i


def odd(i: int) -> int:
    if i % 2:
        raise ValueError(f"{i} is odd")
    return i


def total(numbers: list[int]) -> int:
    return sum(numbers)


def test_reported_tasks_match_the_tasks_of_the_scheduler(ear: Ear, cluster: LocalCluster, client: Client) -> None:
    before = client.map(work, range(20))
    wait(before)
    watch(client, url=ear.url, token="t")
    after = client.map(work, range(100, 130), key=[f"later-{i}" for i in range(30)])
    failed = client.map(odd, range(10), pure=False)
    blamed = client.submit(total, failed)
    data = client.scatter([1, 2, 3])
    wait([*after, *failed, blamed])
    same(ear, cluster, odd={"memory": 5, "erred": 5}, total={"erred": 1}, int={"memory": 3})
    messages = {failure["key"]: failure["message"] for body in ear.bodies for failure in body.get("failures", [])}
    assert len(messages) == 6
    assert messages[str(failed[3].key)].startswith("ValueError('3 is odd')\n")
    assert "raise ValueError" in messages[str(failed[3].key)]
    causes = tuple(f"Its dependency {one.key} failed: ValueError(" for one in failed[1::2])
    assert messages[str(blamed.key)].startswith(causes)
    counts = {count["group"]: count for body in ear.bodies for count in body["counts"]}
    assert counts["later"]["duration_n"] == 30
    assert 0 < counts["later"]["duration_s"] < 10
    assert "duration_n" not in counts["int"]

    del before, after, failed, blamed, data
    same(ear, cluster, odd={"forgotten_done": 5, "forgotten_failed": 5}, total={"forgotten_failed": 1})
    again = client.map(work, range(20))
    wait(again)
    same(ear, cluster, work={"memory": 20, "forgotten_done": 20})


def test_keys_and_groups_need_not_be_text(ear: Ear, cluster: LocalCluster, client: Client) -> None:
    watch(client, url=ear.url, token="t")
    keys = [(1, 2), (("a", 1), 2), (2.5, 1), 7, 8.5, ("t", ("u", 1)), "x\ud800y", "n\0l"]
    futures = [client.submit(odd, number, key=key) for number, key in enumerate(keys)]
    wait(futures)
    eventually(lambda: plain(sums(ear)).get("Other") == own(cluster.scheduler)["Other"])
    eventually(lambda: sum(sum(states.values()) for states in sums(ear).values()) == len(keys))
    groups = {count["group"] for body in ear.bodies for count in body["counts"]}
    assert groups >= {"1", "('a', 1)", "2.5", "Other", "t"}
    failed = {failure["key"] for body in ear.bodies for failure in body.get("failures", [])}
    assert failed == {"(('a', 1), 2)", "7", "('t', ('u', 1))", "n?l"}


def test_watching_twice_counts_once_and_the_end_is_reported(ear: Ear) -> None:
    with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster:
        with Client(cluster) as client:
            watch(client, url=ear.url, token="t")
            watch(client, url=ear.url, token="t")
            wait(client.map(work, range(10)))
            same(ear, cluster)
        with Client(cluster) as client:
            watch(client, url=ear.url, token="t")
            wait(client.map(work, range(10)))
            same(ear, cluster)
    assert sums(ear) == {"work": {"forgotten_done": 20}}
    assert ear.ended == ear.reporters
    assert len(ear.reporters) == 1


def test_unregistering_the_plugin_ends_the_reporter(ear: Ear, cluster: LocalCluster, client: Client) -> None:
    watch(client, url=ear.url, token="t")
    done = client.map(work, range(10))
    wait(done)
    name = next(name for name in cluster.scheduler.plugins if name.startswith("dstackweb-"))
    client.unregister_scheduler_plugin(name)
    eventually(lambda: ear.ended == ear.reporters and len(ear.reporters) == 1)
    assert sums(ear) == {"work": {"memory": 10}}


def test_after_the_attempts_end_nothing_is_reported_and_the_plugin_is_removed(
    ear: Ear, cluster: LocalCluster, client: Client
) -> None:
    ear.answers = [(409, {}, b'{"detail": "it is over"}')]
    watch(client, url=ear.url, token="t")
    wait(client.map(work, range(10)))
    eventually(lambda: not [name for name in cluster.scheduler.plugins if name.startswith("dstackweb")])
    assert not ear.bodies


def test_a_slow_or_unreachable_server_delays_no_task_and_gets_the_newest_states(
    ear: Ear, cluster: LocalCluster, client: Client
) -> None:
    ear.answers = [(503, {}, b""), (429, {"Retry-After": "0.5"}, b"{}"), (500, {}, b"")]
    watch(client, url=ear.url, token="t")
    wait(client.map(work, range(50)))
    same(ear, cluster)


def test_watching_a_cluster_in_the_same_process_does_not_change_its_modules(ear: Ear, client: Client) -> None:
    watch(client, url=ear.url, token="t")
    assert Sender.event.__globals__ is vars(sender)


def test_without_an_address_nothing_is_reported(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSTACKWEB_TASKS_URL", raising=False)
    assert watch(client) is None
    with pytest.raises(ValueError, match="is not an http"):
        watch(client, url="ftp://server/tasks", token="t")


def test_a_killed_worker_and_retries_leave_the_counts_right(ear: Ear) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        watch(client, url=ear.url, token="t")
        done = client.map(work, range(50))
        wait(done)
        slow = client.map(time.sleep, [0.1] * 40, key=[f"slow-{i}" for i in range(40)], retries=3)
        eventually(lambda: own(cluster.scheduler)["slow"].get("memory", 0) > 5)
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        wait(slow)
        wait(done)
        same(ear, cluster, slow={"memory": 40})


def test_a_restart_forgets_all_tasks_and_continues_counting(ear: Ear) -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        watch(client, url=ear.url, token="t")
        first = client.map(work, range(30))
        wait(first)
        waiting = client.map(time.sleep, [60] * 5, key=[f"slow-{i}" for i in range(5)])
        eventually(lambda: sums(ear).get("work") == {"memory": 30} and "slow" in sums(ear))
        client.restart()
        del first, waiting
        wait(client.map(work, range(30, 40)))
        eventually(lambda: sums(ear) == {"work": {"forgotten_done": 40}, "slow": {"forgotten": 5}})


class Scheduler:
    """`dask scheduler` as a process, without workers."""

    def __init__(self, folder: Path, *argv: str, **env: str) -> None:
        self.file = folder / f"scheduler{time.monotonic_ns()}.json"
        environ = {**os.environ, "PYTHONPATH": str(REPO), **env}
        base = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--scheduler-file", str(self.file)]
        self.process = subprocess.Popen(
            [*base, "--port", "0", "--dashboard-address", "127.0.0.1:0", "--host", "127.0.0.1", *argv],
            env=environ,
            cwd=folder,
            stderr=(folder / "scheduler.log").open("ab"),
        )

    def client(self) -> Client:
        eventually(self.file.exists)
        return Client(scheduler_file=str(self.file), timeout=30)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()


BLOCKED = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dstackweb":
            raise ImportError("not here")
sys.meta_path.insert(0, Block())
"""


def test_a_scheduler_without_dstackweb_runs_its_tasks(ear: Ear, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKED)
    with Scheduler(tmp_path, PYTHONPATH=str(tmp_path / "site")) as scheduler, scheduler.client() as client:
        watch(client, url=ear.url, token="t")
        futures = client.map(abs, range(5))
        eventually(lambda: sums(ear) == {"abs": {"queued": 5}})
        del futures
        eventually(lambda: sums(ear) == {"abs": {"forgotten": 5}})


def test_preloaded_it_reports_from_the_beginning_and_each_scheduler_by_its_own_name(ear: Ear, tmp_path: Path) -> None:
    env = {"DSTACKWEB_TASKS_URL": ear.url, "DSTACKWEB_TASKS_TOKEN": "t"}
    for _ in range(2):
        with Scheduler(tmp_path, "--preload", "dstackweb.tracking.dask", **env) as scheduler:
            with scheduler.client() as client:
                futures = client.map(work, range(5))
                eventually(lambda: sums(ear).get("work", {}).get("queued") == 5)
                del futures
            scheduler.process.terminate()
            scheduler.process.wait(10)
    assert sums(ear) == {"work": {"forgotten": 10}}
    assert ear.ended == ear.reporters
    assert len(ear.reporters) == 2
