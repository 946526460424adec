"""Hosts full of running jobs under a policy, one on each GPU, and looks at them."""

from __future__ import annotations

import random

import psutil
from django.core.management import call_command
from django.db import connection
from django.utils import timezone

from bench import sides
from dstackweb.backends.models import Gpu, Host
from dstackweb.gpus import intake
from dstackweb.gpus.models import GpuSample, GpuSeries
from dstackweb.lib.times import to_ms
from dstackweb.runner.nvml import Sample, Snapshot
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.states import JobStatus, RunStatus
from tests.factories import join, make_host, make_project, make_run, make_user

EVERY_MS = 10_000
POLICY = {"min_gpu_utilization": 50, "time_window": "30m"}
A100 = "NVIDIA A100-SXM4-80GB"


class Watched:
    """The project `main` in a machine room that grows; `at_ms` is its time, `jobs` what runs in it."""

    def __init__(self, per_host: int) -> None:
        call_command("migrate", verbosity=0)
        self.per_host = per_host
        self.project = make_project("main")
        self.ada = join(self.project, make_user("ada"), "manager")
        self.pattern = make_run(self.project, self.ada, resources={"gpu": 1}, utilization_policy=POLICY)
        self.hosts: list[Host] = []
        self.jobs: list[Job] = []
        self.started = timezone.now()
        self.at_ms = to_ms(self.started)
        self._used = random.Random(5)

    def grow(self, size: int) -> None:
        """Up to so many GPUs, each with a job that has just begun."""
        while len(self.jobs) < size:
            host = make_host(f"box-{len(self.hosts)}", cpus=64, memory_gib=512, gpus=self.per_host)
            self.hosts.append(host)
            gpus = list(Gpu.objects.filter(host=host).order_by("index"))[: size - len(self.jobs)]
            runs = Run.objects.bulk_create(self._run(len(self.jobs) + number) for number in range(len(gpus)))
            jobs = Job.objects.bulk_create(
                Job(
                    run=run, attempt=1, backend=host.backend, host=host, gpus=[gpu.uuid], started_at=self.started,
                    status=JobStatus.RUNNING,
                )
                for run, gpu in zip(runs, gpus, strict=True)
            )  # fmt: skip
            Allocation.objects.bulk_create(
                Allocation(job=job, host=host, gpu=gpu) for job, gpu in zip(jobs, gpus, strict=True)
            )
            self.jobs += jobs
        sides.settle()

    def _run(self, number: int) -> Run:
        pattern = self.pattern
        return Run(
            project=self.project, queue=pattern.queue, user=self.ada, name=f"train-{number}", shape=pattern.shape,
            spec=pattern.spec, provenance=pattern.provenance, config_text=pattern.config_text,
            seniority_us=number, rank=number, status=RunStatus.RUNNING, started_at=self.started,
        )  # fmt: skip

    def round(self) -> None:
        """An interval passes, and every host is looked at; each sample must be there afterwards."""
        self.at_ms += EVERY_MS
        for host in self.hosts:
            samples = tuple(self._sample(host, index) for index in range(self.per_host))
            intake.add_snapshot(host, Snapshot(samples, took_ms=0.4), self.at_ms)
        looked = self.per_host * len(self.hosts)
        sides.must_be(GpuSeries.objects.filter(last_ms=self.at_ms).count(), looked)

    def _sample(self, host: Host, index: int) -> Sample:
        used = self._used.choice((0, 3, 40, 70, 99))
        processes = ({"pid": 4711, "user": "ada", "memory_mib": 40_000},)
        return Sample(
            f"GPU-{host.name}-{index}", index, A100, 81920, used, 40_000 + used, 100 + used, 400, 40, 0, processes
        )

    def fill(self, gpus: int, span_ms: int) -> int:
        """Samples of all the time before for some of the GPUs; returns how many samples there are then."""
        last = list(GpuSeries.objects.order_by("id").values_list("pk", flat=True)[:gpus])[-1]
        series = GpuSeries.objects.filter(pk__lte=last)
        with connection.cursor() as cursor:
            cursor.execute(
                "WITH RECURSIVE moment(at_ms) AS (SELECT CAST(%s AS bigint) UNION ALL"
                " SELECT at_ms + 10000 FROM moment WHERE at_ms < %s)"
                " INSERT INTO gpus_gpusample"
                " (series_id, at_ms, utilization, memory_used_mib, power_w, temperature_c, throttle)"
                " SELECT series.id, at_ms, 40 + (at_ms / 10000) %% 50, 40000, 150, 40, 0"
                " FROM gpus_gpuseries series, moment WHERE series.id <= %s ORDER BY at_ms",
                [self.at_ms - span_ms, to_ms(self.started) - EVERY_MS, last],
            )
        series.update(first_ms=self.at_ms - span_ms)
        sides.settle()
        return GpuSample.objects.count()

    def database_cpu_s(self) -> float:
        """CPU seconds that the database server's processes have had; 0 where it has none of its own."""
        if connection.vendor != "postgresql":
            return 0.0
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            backend = psutil.Process(cursor.fetchone()[0])
        postmaster = backend.parent()
        assert postmaster is not None
        times = [process.cpu_times() for process in (postmaster, *postmaster.children())]
        return sum(one.user + one.system for one in times)
