"""Slow clouds never occupy all workers of a machine: one is left for passes."""

from __future__ import annotations

import datetime as dt
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.scheduler.cloud import watch as cloud_watch
from dstackweb.scheduler.models import PeriodicJob
from dstackweb.scheduler.processes import tasks
from dstackweb.scheduler.processes.tasks import cloud_slot, slot_count


@pytest.fixture(autouse=True)
def home(settings: Any, tmp_path: Path) -> Path:
    settings.DSTACKWEB_HOME = tmp_path
    return tmp_path


@pytest.mark.parametrize(
    ("workers", "cloud", "most"), [(1, "dstackweb", 1), (2, "dstackweb", 1), (5, "dstackweb", 4), (5, "clouds", 5)]
)
def test_one_worker_is_left_for_passes(settings: Any, workers: int, cloud: str, most: int) -> None:
    settings.DSTACKWEB_CLUSTER_WORKERS = workers
    settings.DSTACKWEB_CLUSTERS = {"control": "dstackweb", "cloud": cloud}
    assert slot_count() == most


@pytest.mark.django_db
def test_work_without_a_free_cloud_slot_is_left_to_the_next_tick(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leftovers, which are looked for every five minutes, are looked for soon."""
    settings.DSTACKWEB_CLUSTER_WORKERS = 3
    later = timezone.now() + dt.timedelta(seconds=300)
    PeriodicJob.objects.create(name="cloud-orphans", due_at=later)
    done: list[str] = []

    def tick() -> None:
        done.append("tick")
        with cloud_slot() as second:
            assert second
            tasks.poll_cloud_jobs("a job")
            tasks.end_orphan_instances()

    monkeypatch.setattr(cloud_watch, "poll_all", tick)
    monkeypatch.setattr(cloud_watch, "poll_jobs", lambda _jobs: done.append("job"))
    monkeypatch.setattr(cloud_watch, "end_orphans", lambda: done.append("reap"))
    tasks.poll_clouds()
    assert done == ["tick"]
    assert PeriodicJob.objects.get().due_at < later - dt.timedelta(seconds=200)
    tasks.poll_cloud_jobs("a job")
    tasks.end_orphan_instances()
    assert done == ["tick", "job", "reap"]


@pytest.mark.django_db
@pytest.mark.parametrize("work", [tasks.poll_clouds, lambda: tasks.poll_cloud_jobs("an urgent one")])
def test_what_finds_no_free_slot_is_done_right_after_the_work_that_has_it(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]
) -> None:
    """That work may have looked for launches for the last time."""
    now = timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: now)
    PeriodicJob.objects.create(name="cloud", due_at=now + dt.timedelta(seconds=5))
    with cloud_slot() as is_free:
        assert is_free
        work()
    assert PeriodicJob.objects.get().due_at <= now + dt.timedelta(seconds=0.5)


def test_a_worker_that_is_killed_or_fails_leaves_its_turn() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        with cloud_slot() as mine:
            os.write(writer, b"1" if mine else b"0")
            signal.pause()
    assert os.read(reader, 1) == b"1"
    with cloud_slot() as mine:
        assert not mine
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(ZeroDivisionError):
        _fail()
    with cloud_slot() as mine:
        assert mine


def _fail() -> None:
    with cloud_slot() as mine:
        assert 1 / (1 - mine)


@pytest.mark.django_db
def test_servers_that_hang_leave_clouds_the_slot_for_four_fifths_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who may write to a channel must not hold up everybody's instances."""
    PeriodicJob.objects.create(name="test-notices", due_at=timezone.now())
    clock = iter([100.0, 118.0])
    monkeypatch.setattr(tasks, "_registered", {})
    monkeypatch.setattr(tasks.time, "monotonic", lambda: next(clock))
    done: list[str] = []

    def hang() -> None:
        done.append("tick")
        raise TimeoutError

    tasks.register_calls("test-notices", hang, 3.0, lambda: True)
    (job,) = (job for job in tasks.control_jobs() if job.name == "test-notices")
    with cloud_slot() as mine:
        assert mine
        job.work()
    assert done == []
    before = timezone.now()
    with pytest.raises(TimeoutError):
        job.work()
    pause = PeriodicJob.objects.get(name="test-notices").due_at - before
    assert dt.timedelta(seconds=72) <= pause < dt.timedelta(seconds=80)
