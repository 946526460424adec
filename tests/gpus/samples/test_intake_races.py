"""Looks, averages and a policy that changes, all at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from django.db import connection, transaction

from dstackweb.gpus import averages, binding, intake
from dstackweb.gpus.models import GpuAverage, GpuSample, GpuSeries, JobPolicy
from dstackweb.gpus.window import Stretch, replay
from dstackweb.lib.times import to_moment
from dstackweb.runs.models import Job, Run
from tests.factories import cloud_job, join, make_host, make_project, make_run, make_user, place_all, start
from tests.gpus.snapshots import EVERY_MS, START_MS, sample, snapshot

LOOKS = 40


@pytest.mark.django_db(transaction=True)
def test_concurrent_senders_lose_no_sample_and_leave_the_correct_low_stretch() -> None:
    project = make_project("main")
    member = join(project, make_user("ada"))
    host = make_host(gpus=2)
    policy = {"min_gpu_utilization": 50, "time_window": "1h"}
    for _ in range(2):
        make_run(project, member, resources={"gpu": 1}, utilization_policy=policy)
    assert place_all() == 2
    for job in Job.objects.all():
        start(job)
    Job.objects.update(started_at=to_moment(START_MS))
    errors: list[BaseException] = []
    number = iter(range(LOOKS))
    order = threading.Lock()

    def looks() -> None:
        while True:
            with order:
                place = next(number, None)
            if place is None:
                return
            intake.add_snapshot(host, snapshot(g0=60, g1=80 if place % 9 == 0 else 10), START_MS + place * EVERY_MS)

    def changes() -> None:
        for minimum in (70, 30, 90, 70):
            for job in Job.objects.order_by("pk"):
                with transaction.atomic():
                    run = Run.objects.get(pk=job.run_id)
                    run.spec["utilization_policy"]["min_gpu_utilization"] = minimum
                    run.save(update_fields=["spec"])
                    binding.rebind(job)

    def rolls() -> None:
        for _ in range(10):
            averages.roll(to_moment(START_MS + LOOKS * EVERY_MS + 120_000))

    def guarded(act: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                act()
            except BaseException as error:
                errors.append(error)
            finally:
                connection.close()

        return run

    threads = [threading.Thread(target=guarded(act)) for act in (looks, looks, changes, rolls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    averages.roll(to_moment(START_MS + LOOKS * EVERY_MS + 400_000))
    assert GpuSample.objects.count() == 2 * LOOKS
    assert sum(GpuAverage.objects.values_list("samples", flat=True)) == 2 * LOOKS
    for series in GpuSeries.objects.all():
        assert JobPolicy.objects.get(pk=series.job_id).min_gpu_utilization == 70
        seen = list(series.samples.order_by("at_ms").values_list("at_ms", "utilization"))
        assert series.last_ms == seen[-1][0]
        plain, kept = replay(seen, 70, 10_000), Stretch(series.low_since_ms, series.low_last_ms)
        # Out of order it may be shorter than the samples show, and never longer.
        assert kept.last_ms == plain.last_ms
        assert kept.since_ms is None or (plain.since_ms is not None and kept.since_ms >= plain.since_ms)


@pytest.mark.django_db(transaction=True)
def test_first_samples_that_name_the_gpus_in_other_orders_do_not_wait_for_each_other() -> None:
    project = make_project("main")
    member = join(project, make_user("ada"))
    uuids = [f"GPU-i-{number}" for number in range(1500)]
    errors: list[BaseException] = []
    rounds = 5 if connection.vendor == "postgresql" else 1  # SQLite has one writer at a time: no deadlocks
    for _ in range(rounds):
        job = cloud_job(make_run(project, member))
        Job.objects.filter(pk=job.pk).update(gpus=uuids)
        start(job)
        Job.objects.filter(pk=job.pk).update(started_at=to_moment(START_MS))
        job.refresh_from_db()
        both = threading.Barrier(2)

        def post(order: list[str], job: Job = job, both: threading.Barrier = both) -> None:
            try:
                both.wait()
                intake.add_samples(job, [(START_MS, [sample(uuid) for uuid in order])], START_MS)
            except BaseException as error:
                errors.append(error)
            finally:
                connection.close()

        threads = [threading.Thread(target=post, args=(order,)) for order in (uuids, uuids[::-1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert GpuSample.objects.filter(series__job=job).count() == len(uuids)
    assert not errors
