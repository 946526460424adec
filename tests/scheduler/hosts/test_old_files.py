"""Directories of runs on their host: they go when the run has ended long ago, or was removed, and not before."""

from __future__ import annotations

import datetime as dt
import os
import time
from pathlib import Path
from uuid import uuid4

import pytest
from django.db.models import Q
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Host
from dstackweb.runs import removal
from dstackweb.runs.models import RemovedRun, Run
from dstackweb.scheduler import hosts
from dstackweb.scheduler.models import Retention
from tests.factories import make_host
from tests.runs.test_removal import done_run

pytestmark = pytest.mark.django_db


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return make_host(runs_dir=str(tmp_path))


def directory(host: Host, uid: object, age_days: float = 0) -> Path:
    folder = Path(host.runs_dir) / str(uid)
    (folder / "node-0").mkdir(parents=True)
    os.utime(folder, (time.time() - age_days * 86400,) * 2)
    return folder


def test_a_directory_is_kept_for_days_from_the_runs_end_not_from_its_start(
    project: Project, member: User, host: Host
) -> None:
    run = done_run(project, member)
    folder = directory(host, run.uid, age_days=30)
    hosts.remove_old_files(host.name)
    assert folder.exists()
    Run.objects.update(ended_at=timezone.now() - dt.timedelta(days=15))
    hosts.remove_old_files(host.name)
    assert not folder.exists()


def test_the_directory_of_a_removed_run_is_deleted_at_once(project: Project, member: User, host: Host) -> None:
    run = done_run(project, member)
    folder = directory(host, run.uid)
    removal.remove([run.pk], Q())
    hosts.remove_old_files(host.name)
    assert not folder.exists()


def test_a_host_that_was_offline_deletes_the_directory_once_it_is_old(
    project: Project, member: User, host: Host
) -> None:
    run = done_run(project, member)
    folder = directory(host, run.uid, age_days=20)
    removal.remove([run.pk], Q())
    RemovedRun.objects.update(at=timezone.now() - dt.timedelta(days=20))
    hosts.remove_old_files(host.name)
    assert not folder.exists()


def test_the_directory_of_an_unknown_run_stays(host: Host) -> None:
    folder = directory(host, uuid4(), age_days=1000)
    hosts.remove_old_files(host.name)
    assert folder.exists()


def test_a_backlog_of_directories_is_deleted_over_several_ticks(
    project: Project, member: User, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """43,000 runs a day are 300 in ten minutes; it was 20."""
    run = done_run(project, member)
    ended = timezone.now() - dt.timedelta(days=15)
    uids = [uuid4() for _ in range(300)]
    RemovedRun.objects.bulk_create(RemovedRun(uid=uid, ended_at=ended) for uid in [run.uid, *uids])
    for uid in uids:
        directory(host, uid, age_days=20)
    assert hosts.remove_old_files(host.name, budget_s=0)
    assert Retention.objects.get(kind="run_dirs").waiting == 300
    assert not hosts.remove_old_files(host.name)
    assert not list(Path(host.runs_dir).iterdir())
    assert Retention.objects.get(kind="run_dirs").pruned == 300
