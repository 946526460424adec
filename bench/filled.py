"""A team's queue of any length: a project, a full machine room, and waiting runs of twenty shapes that fit nowhere."""

from __future__ import annotations

from typing import Any

from django.core.management import call_command

from bench import sides
from dstackweb.runs import services
from dstackweb.runs.models import Queue, QueueCount, Run
from dstackweb.runs.queue.queues import now_us
from dstackweb.scheduler.passes.placement_pass import run_passes
from tests.factories import count_runs_anew, join, make_host, make_project, make_run, make_user

SHAPES = 20
BOXES = 8


class Filled:
    """The project `main` with its default queue. `ada` manages it; the host `large` takes runs without GPUs."""

    def __init__(self, room: int) -> None:
        """`room`: how many CPUs `large` has."""
        call_command("migrate", verbosity=0)
        self.project = make_project("main")
        self.ada = join(self.project, make_user("ada"), "manager")
        self.queue = services.ensure_queue(self.project)
        for index in range(BOXES):
            make_host(f"box-{index}", cpus=64, memory_gib=512, gpus=8)
            make_run(self.project, self.ada, f"holds-{index}", resources={"cpu": 8, "gpu": 8})
        sides.must_be(run_passes(), BOXES)
        make_host("large", cpus=room, memory_gib=room)
        self.patterns = [
            make_run(self.project, self.ada, resources={"cpu": 1 + index // 8, "gpu": 1 + index % 8})
            for index in range(SHAPES)
        ]

    def fill(self, size: int) -> None:
        """Waiting runs up to `size`, of each shape in turn, as if they had been submitted; then a pass."""
        there = QueueCount.objects.get(queue=self.queue).submitted
        now = now_us()
        Run.objects.bulk_create(
            (
                Run(
                    project=self.project, queue=self.queue, user=self.ada, name=f"train-{index}", shape=pattern.shape,
                    spec=pattern.spec | {"name": f"train-{index}"}, provenance=pattern.provenance,
                    config_text=pattern.config_text, seniority_us=now + index,
                    rank=now + index - 50 * self.queue.step_us,
                )
                for index, pattern in ((index, self.patterns[index % SHAPES]) for index in range(there, size))
            ),
            batch_size=2000,
        )  # fmt: skip
        QueueCount.objects.filter(queue=self.queue).update(submitted=size)
        count_runs_anew()
        Queue.objects.filter(pk=self.queue.pk).update(last_seniority_us=now + size)
        sides.must_be(run_passes(), 0)
        sides.settle()

    def submit(self, number: int, **keys: Any) -> list[Run]:
        """Runs that `large` has room for."""
        return [make_run(self.project, self.ada, role="manager", **keys) for _ in range(number)]

    def waiting(self, share: float) -> Run:
        """The run that this share of the queue stands before."""
        waiting = Run.objects.filter(queue=self.queue, status="submitted").order_by("rank", "id")
        size = QueueCount.objects.get(queue=self.queue).submitted
        return waiting.select_related("queue", "project", "user")[int(size * share)]

    def middle(self) -> Run:
        """The run in the middle of the queue."""
        return self.waiting(0.5)
