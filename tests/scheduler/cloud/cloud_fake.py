"""A cloud in memory, for tests of what the scheduler does with one: machines, refusals, throttling, a clock."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from django.conf import settings
from django.utils import timezone

from dstackweb.backends.contract import (
    Availability,
    CloudInstance,
    InstanceOrder,
    InstanceState,
    LaunchFailed,
    LaunchFailure,
    Offer,
    SourceFailed,
)
from dstackweb.backends.models import Backend, Instance
from dstackweb.runs.models import Job, Run
from dstackweb.scheduler import watch
from dstackweb.scheduler.cloud import agents, launching, watch as cloud_watch
from dstackweb.spec.effective import Requirements
from tests.backends.kinds import use_driver
from tests.factories import place_all, start

STEP_S = 15.0
"""Seconds between two checks: the most that the watcher counts with these settings."""
THROTTLED = SourceFailed("throttled", until="2026-01-01T00:00:00+00:00")


def offer(instance_type: str = "m5.large", price: str = "1.0", **fields: Any) -> Offer:
    values: dict[str, Any] = {
        "backend": "aws", "cpus": 4, "memory_mib": 16384, "region": "eu",
        "availability": Availability.AVAILABLE, "price": Decimal(price),
    } | fields  # fmt: skip
    return Offer(instance_type=instance_type, **values)


class FakeCloud:
    """`fails` has for an instance type what its launch raises; `before` is called as a launch begins, `during` once it
    has succeeded, before its answer; `throttled` is raised by all calls. Zones that are `full` have no capacity."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offers: list[Offer] = [offer()]
        self.there: dict[str, CloudInstance] = {}
        self.full: set[str] = set()
        self.fails: dict[str, Exception] = {}
        self.throttled: Exception | None = None
        self.before: Callable[[], object] = lambda: None
        self.during: Callable[[], object] = lambda: None
        self.pauses: list[float] = []
        self.launches: list[str] = []
        self.terminated: list[str] = []
        self.regions = ["eu", "us"]
        self.asked = 0
        self.now = timezone.now()
        self.monotonic = 1000.0
        fake = self

        class Driver:
            def __init__(self, backend: Backend) -> None:
                self.backend = backend

            def offers(self, requirements: Requirements, *, image: str | None = None) -> Sequence[Offer]:
                return [replace(one, backend=self.backend.name) for one in fake.offers]

            def launch(self, order: InstanceOrder) -> CloudInstance:
                return fake.launch(order)

            def instances(self, region: str, deployment: str) -> Sequence[CloudInstance]:
                fake.ask()
                return [machine for machine in fake.there.values() if machine.region == region]

            def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
                fake.ask()
                for cloud_id in cloud_ids:
                    fake.terminated.append(cloud_id)
                    fake.set(cloud_id, state=InstanceState.ENDING)

            def regions(self) -> Sequence[str]:
                return fake.regions

        use_driver(monkeypatch, "aws", Driver)
        monkeypatch.setattr(timezone, "now", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)
        monkeypatch.setattr(launching.launch_waiting, "__defaults__", (launching.WORK_S, self.pause))
        monkeypatch.setattr(settings, "DSTACKWEB_WATCH_EVERY_S", 60 / watch.MAX_STEP)
        monkeypatch.setattr(watch, "boot_id", lambda: "boot")
        self.backend = Backend.objects.create(name="aws", kind="aws")

    def ask(self) -> None:
        self.asked += 1
        if self.throttled is not None:
            raise self.throttled

    def pause(self, seconds: float) -> None:
        """A worker waits for its turn."""
        self.pauses.append(seconds)
        self.now += dt.timedelta(seconds=seconds)
        self.monotonic += seconds

    def launch(self, order: InstanceOrder) -> CloudInstance:
        self.before()
        self.ask()
        self.launches.append(order.instance_type)
        made = next((one for one in self.there.values() if one.instance == order.instance), None)
        if made is None:
            if order.instance_type in self.fails:
                raise self.fails[order.instance_type]
            cloud_id = f"i-{len(self.there)}"
            wanted = [zone for zone in order.zones if zone not in order.full_zones]
            zone = wanted[0] if wanted else ""
            if zone in self.full:
                raise LaunchFailed(LaunchFailure.NO_CAPACITY, "not here", zone=zone, elsewhere=len(wanted) > 1)
            made = CloudInstance(
                order.instance, cloud_id, order.region, InstanceState.STARTING, zone, launched_at=self.now
            )
            self.there[cloud_id] = made
        during, self.during = self.during, lambda: None
        during()
        return made

    def set(self, cloud_id: str, **fields: Any) -> None:
        self.there[cloud_id] = replace(self.there[cloud_id], **fields)

    def tick(self, seconds: float = 5.0, step_s: float = STEP_S) -> None:
        """Time passes, as the watcher's and everybody's; then one look of the watcher, and one at the clouds."""
        while seconds > 0:
            step = min(seconds, step_s)
            self.now += dt.timedelta(seconds=step)
            self.monotonic += step
            seconds -= step
            watch.watch()
            cloud_watch.poll_all()

    def settle(self) -> None:
        """What ends has ended."""
        for cloud_id, machine in self.there.items():
            if machine.state is InstanceState.ENDING:
                self.set(cloud_id, state=InstanceState.GONE)
        self.tick(35)


def begin(fake: FakeCloud) -> None:
    """Placed, launched, joined."""
    assert place_all()
    cloud_watch.poll_all()
    joined()


def joined() -> None:
    """The agents of all machines that are starting call for the first time."""
    for instance in Instance.objects.filter(status="starting"):
        agents.join(instance.pk, agents.join_token(instance.pk)[0], f"n{instance.pk}"[:60], gpus=[], address="10.0.0.1")


def running(run: Run, fake: FakeCloud) -> Job:
    """The run's only job, with its commands under way on a machine."""
    begin(fake)
    return start(job_of(run))


def job_of(run: Run) -> Job:
    return Job.objects.select_related("instance", "run").get(run=run, attempt=Run.objects.get(pk=run.pk).attempt)


def refused(code: str = "no_capacity") -> LaunchFailed:
    return LaunchFailed(LaunchFailure(code), "not today")
