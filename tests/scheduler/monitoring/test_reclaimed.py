"""GPUs freed by a stop: which run is first in the queue, and which got them."""

from __future__ import annotations

import datetime as dt

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.models import PolicyStop
from dstackweb.runs.models import Job
from dstackweb.scheduler import utilization
from dstackweb.wording.events import event_text
from tests.factories import cloud_job, make_host, make_project, make_run, place_all, placed_job
from tests.gpus.watching import IDLE, MINUTE, begin, stopped, watch

pytestmark = pytest.mark.django_db


def test_the_event_names_the_next_run_and_later_the_one_that_got_the_gpus(project: Project, member: User) -> None:
    make_host(gpus=1)
    job = begin(project, member, utilization_policy=IDLE)
    make_run(project, member, "cpu-only", priority=70, resources={"cpu": 64})
    place_all()
    make_run(project, member, "train-7", resources={"gpu": 1})
    place_all()
    watch(MINUTE)
    PolicyStop.objects.update(at=job.placed_at)  # the pass below goes by the real time
    stop = job.run.events.get(kind="utilization_stop")
    assert event_text(stop, 1).endswith("GPU 0 was below 50 % for 1 min; first in the queue now: train-7")
    stopped(job.run)
    assert place_all() == 1
    ledger = PolicyStop.objects.get()
    assert ledger.next_run is not None
    assert (ledger.next_run.name, ledger.next_at) == ("train-7", placed_job(ledger.next_run).placed_at)
    assert event_text(job.run.events.get(kind="utilization_next"), 1) == "its GPUs went to train-7"
    place_all()
    assert job.run.events.filter(kind="utilization_next").count() == 1


def test_another_projects_run_is_not_named(project: Project, member: User) -> None:
    make_host(gpus=1)
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE)
    PolicyStop.objects.update(at=job.placed_at)
    stopped(job.run)
    other = make_project("other")
    make_run(other, member, "secret", role="admin", resources={"gpu": 1})
    place_all()
    event = job.run.events.get(kind="utilization_next")
    assert (event.data, event_text(event, 1)) == ({}, "its GPUs went to a run of another project")


def test_the_next_run_on_a_cloud_instance_is_recorded(project: Project, member: User) -> None:
    first, second = (make_run(project, member, name, resources={"gpu": 1}) for name in ("first", "second"))
    job = cloud_job(first)
    stop = PolicyStop.objects.create(
        project=project, run=first, run_name="first", at=job.placed_at, low_since=job.placed_at, gpus=["GPU-1"],
        min_gpu_utilization=50, time_window_s=60, scope="any",
    )  # fmt: skip
    assert utilization.record_next_runs(job.placed_at) == 0
    after = cloud_job(second)
    Job.objects.filter(pk=after.pk).update(instance=job.instance)
    assert utilization.record_next_runs(job.placed_at) == 1
    stop.refresh_from_db()
    assert (stop.next_run, stop.next_at) == (second, after.placed_at)
    assert utilization.record_next_runs(job.placed_at + dt.timedelta(days=2)) == 0
