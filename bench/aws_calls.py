"""What AWS is asked, over HTTP: for twenty runs submitted at once, while it throttles for twenty minutes, and while
twenty runs are launched, or can't be.

    python -m bench.aws_calls [sqlite|postgres] [at-once] [throttled] [launches]

The AWS is the small one of standins/aws, which counts the requests itself. Minutes are simulated: the clocks that the
code reads are moved between ticks, and by the waits for the rate limit; the calls are real. The database cache goes
with SQLite, Redis with PostgreSQL.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from bench import sides
from bench.offers_cache import in_processes

RUNS = 20
REGIONS = ("eu-west-1", "us-east-1")
FAMILIES = ("g5", "g6", "p4d", "p5")
STEP_S, MINUTES = 5, 20
SOURCES = ("instance_types", "prices", "spot_prices", "quotas", "quota_use")
LAUNCHED_S = 150
"""How long each way of launching twenty runs is followed."""
THROTTLED = "throttled midway"
THROTTLED_S = 30
"""How long EC2 throttles all calls once half of them are launched."""
SHOWN = (
    "ListServiceQuotas", "GetProducts", "DescribeInstanceTypes", "DescribeInstanceTypeOfferings",
    "DescribeSpotPriceHistory", "DescribeSpotInstanceRequests", "DescribeInstances", "DescribeImages", "GetParameter",
    "RunInstances",
)  # fmt: skip

moved = dt.timedelta(0)


def move_the_clocks() -> None:
    """Let Django's clock, that of rate limits and the monotonic one be ahead by `moved` from here on."""
    from django.utils import timezone

    real, real_ns, real_monotonic = timezone.now, time.time_ns, time.monotonic
    timezone.now = lambda: real() + moved
    time.time_ns = lambda: real_ns() + round(moved.total_seconds() * 1e9)
    time.monotonic = lambda: real_monotonic() + moved.total_seconds()


def wait(seconds: float) -> None:
    """Wait in the simulated time."""
    global moved
    moved += dt.timedelta(seconds=seconds)


def measure() -> None:
    """Prints the tables of this process's side."""
    import django

    os.environ["DSTACKWEB_PUBLIC_URL"] = "https://gpus.example.org"
    move_the_clocks()
    django.setup()
    from django.core.management import call_command

    logging.disable(logging.WARNING)
    call_command("migrate", verbosity=0)
    from dstackweb.backends.aws import client
    from standins.aws import Cloud

    mock.patch.object(client, "Aws", partial(client.Aws, sleep=wait)).start()
    cloud = Cloud.start()
    os.environ |= cloud.env
    try:
        parts = {"at-once": twenty_at_once, "throttled": throttled, "launches": launched}
        for part in sys.argv[1:] or parts:
            parts[part](cloud)
    finally:
        cloud.stop()


def twenty_at_once(cloud: Any) -> None:
    """Plans of twenty runs while the sources are fetched, with nothing known and again."""
    from django.db.models import Sum
    from django.utils import timezone

    from dstackweb.offers import catalog, counts, source_rows, sources, store
    from dstackweb.offers.models import CacheCount
    from dstackweb.scheduler.passes.decision import plan

    backend, project, user = a_backend(), *someone()
    sources.TICK_S = 60.0

    def look(memory_gb: int) -> None:
        """One run: its plan, with what is due asked for, until it knows what there is."""
        ends = time.monotonic() + 60
        while not plan(project, user, "admin", submission(memory_gb)).offers:
            sides.must_be(time.monotonic() < ends, True)
            sources.refresh_due(timezone.now())
            time.sleep(0.05)
        counts.flush()

    def calls(processes: int, *, same: bool) -> list[str]:
        for module in (catalog, sources):
            module.forget()
        backend.source_rows.all().delete()
        backend.results.all().delete()
        store.restamp(source_rows.catalog_name(backend.pk))
        found = []
        for _ in ("cold", "warm"):
            cloud.forget_calls()
            CacheCount.objects.all().delete()
            each = RUNS // processes
            in_processes([
                [lambda memory=1 if same else 1 + (process * each + index) % 8: look(memory) for index in range(each)]
                for process in range(processes)
            ])  # fmt: skip
            sums = CacheCount.objects.aggregate(calls=Sum("calls"), uncached=Sum("uncached"))
            asked = cloud.calls()
            sides.must_be({call["code"] for call in asked} - {""}, set())
            found.append(f"{sums['calls'] or 0} / {len(asked)} / {sums['uncached'] or 0}")
        return found

    rows = {
        f"{wanted} requirements, {processes} process{'es' if processes > 1 else ''}": calls(
            processes, same=wanted == "the same"
        )
        for wanted in ("the same", "8 different")
        for processes in (1, 4)
    }
    number = len(SOURCES) * len(REGIONS)
    print(f"{RUNS} runs at once, {number} sources: sources asked / HTTP requests, pages and zones included /")
    print("sources that would be asked without a cache", flush=True)
    sides.table(f"{sides.database()}:", ["cold", "warm"], rows)


def throttled(cloud: Any) -> None:
    """Twenty minutes in which every ListServiceQuotas is throttled: with quotas known before, and without."""
    rows = {}
    for name, known in {"quotas known before": True, "quotas never known": False}.items():
        rows[name] = twenty_minutes(cloud, known=known)
    columns = ["failed, of 20 runs", "waiting / placed", "calls a minute", "recovered after"]
    sides.table(f"{sides.database()}, ListServiceQuotas throttled for {MINUTES} min:", columns, rows)


def twenty_minutes(cloud: Any, *, known: bool) -> list[str]:
    """The cells of a row."""
    global moved
    from django.utils import timezone

    from dstackweb.lib.models import Bucket, Circuit
    from dstackweb.offers import catalog, sources
    from dstackweb.runs.models import Job, Run
    from dstackweb.runs.services import submit
    from dstackweb.scheduler.passes.placement_pass import run_passes

    Job.objects.all().delete()
    Run.objects.all().delete()
    Circuit.objects.all().delete()
    Bucket.objects.all().delete()
    backend, project, user = a_backend(), *someone()
    backend.source_rows.all().delete()
    for module in (catalog, sources):
        module.forget()
    cloud.reset()
    cloud.quota("L-DB2E81BA", 0)
    cloud.quota("L-3819A6DF", 0)
    if known:
        sources.refresh_due(timezone.now())
    cloud.throttle("servicequotas", "ListServiceQuotas")
    for index in range(RUNS):
        submit(project, user, "admin", submission(1, name=f"{'known' if known else 'new'}-{index}"))
    minutes: list[int] = []
    for _minute in range(MINUTES):
        cloud.forget_calls()
        for _ in range(60 // STEP_S):
            moved += dt.timedelta(seconds=STEP_S)
            sources.refresh_due(timezone.now())
            run_passes()
        minutes.append(cloud.count("servicequotas"))
    statuses = Counter(Run.objects.values_list("status", flat=True))
    cloud.unthrottle()
    waited = 0
    while not quotas_are_fresh(backend):
        moved += dt.timedelta(seconds=STEP_S)
        waited += STEP_S
        sources.refresh_due(timezone.now())
        sides.must_be(waited < 3600, True)
    return [
        str(statuses["failed"] + statuses["terminated"]),
        f"{statuses['submitted'] + statuses['pending']} / {statuses['provisioning']}",
        f"{sum(minutes) / MINUTES:.1f}, at most {max(minutes)}",
        f"{waited} s",
    ]


def launched(cloud: Any) -> None:
    """Twenty runs that become instances, or don't: HTTP requests by API, of all regions."""
    from dstackweb.offers import sources

    sources.TICK_S = 60.0
    ways = {
        "cold": lambda: None,
        "warm": lambda: None,
        "no capacity": lambda: cloud.capacity(0),
        THROTTLED: lambda: None,
        "garbage": lambda: garbage(cloud),
        "image missing": lambda: cloud.fail("ssm", "GetParameter", code="ParameterNotFound", status=400),
    }
    columns = {way: twenty_launches(cloud, way, prepare) for way, prepare in ways.items()}
    rows = {api: [str(counts[api]) for counts in columns.values()] for api in SHOWN}
    rows["others"] = [
        str(sum(number for api, number in counts.items() if api not in SHOWN and api[0].isupper()))
        for counts in columns.values()
    ]
    for name in (
        "throttled: RunInstances", "throttled: DescribeInstances", "retries by boto3", "instances", "failed runs",
        "runs that lost an attempt", "without offers",
    ):  # fmt: skip
        rows[name] = [str(counts[name]) for counts in columns.values()]
    for name in ("the last launch after, s", "the urgent launch after, s"):
        rows[name] = [str(counts[name] or "–") for counts in columns.values()]
    heading = f"{sides.database()}, requests in {LAUNCHED_S} s for {RUNS} runs:"
    sides.table(heading, [*columns], rows)
    print(f"{THROTTLED}: EC2 throttles all calls for {THROTTLED_S} s, once {RUNS // 2} runs are launched; then one")
    print("more comes with priority 100, and is the next to be launched")
    floor = Counter(call["action"] for call in fetched_once(cloud))
    print(f"floor: each source of {len(REGIONS)} regions read once, all pages: {dict(sorted(floor.items()))};")
    print("one RunInstances for each instance, one DescribeInstances when an instance is due\n", flush=True)


def garbage(cloud: Any) -> None:
    """From now on Service Quotas and Pricing answer with a body that is no JSON, and 200."""
    for service, action in (("servicequotas", "ListServiceQuotas"), ("pricing", "GetProducts")):
        cloud.answer(service, action, bodies=["{oops"])


def twenty_launches(cloud: Any, way: str, prepare: Callable[[], None]) -> Counter[str]:
    """Requests by API; and what became of the runs."""
    from django.db.models import Sum
    from django.utils import timezone

    from dstackweb.backends import api_calls
    from dstackweb.backends.models import ApiCount, Instance, InstanceStatus
    from dstackweb.offers import sources
    from dstackweb.runs.codes import RunEventKind
    from dstackweb.runs.models import Run, RunEvent, Verdict
    from dstackweb.runs.services import submit
    from dstackweb.scheduler.cloud import launching, watch
    from dstackweb.scheduler.passes.placement_pass import run_passes

    begin_anew(cloud)
    if way != "cold":
        sources.refresh_due(timezone.now())
        cloud.forget_calls()
    prepare()
    if way == "garbage":
        # As old as they get: they are read again at once.
        a_backend().source_rows.all().update(fetched_at=timezone.now() - dt.timedelta(days=1), used_at=timezone.now())
    project, user = someone()
    for index in range(RUNS):
        submit(project, user, "admin", submission(1, name=f"{way.replace(' ', '-')}-{index}"))
    starts = RunEvent.objects.filter(kind=RunEventKind.MACHINE_STARTED).order_by("pk")
    began = timezone.now()
    urgent: Run | None = None
    place = 0  # of the urgent run among the launches

    def pause(seconds: float) -> None:
        """Wait in the simulated time. What happens by then happens beside a worker that launches."""
        nonlocal urgent, place
        wait(seconds)
        if way == THROTTLED and urgent is None and starts.count() >= RUNS // 2:
            cloud.throttle("ec2")
            place = starts.count()
            urgent, _ = submit(project, user, "admin", submission(1, name="urgent", priority=100))
            run_passes()
        elif urgent is not None and timezone.now() > urgent.queued_at + dt.timedelta(seconds=THROTTLED_S):
            cloud.unthrottle("ec2")

    launch_waiting = launching.launch_waiting
    launching.launch_waiting = partial(launch_waiting, pause=pause)
    without_offers = set()
    while (now := timezone.now()) < began + dt.timedelta(seconds=LAUNCHED_S):
        sources.refresh_due(now)
        run_passes()
        watch.poll_all()
        impossible = Verdict.objects.filter(reason="impossible").values("shape")
        without_offers |= set(Run.objects.filter(status="submitted", shape__in=impossible).values_list("pk", flat=True))
        pause(1.0)
    launching.launch_waiting = launch_waiting

    counts = Counter(call["action"] for call in cloud.calls())
    counts.update(f"throttled: {call['action']}" for call in cloud.calls() if call["code"] == "RequestLimitExceeded")
    api_calls.flush()
    counts["retries by boto3"] = ApiCount.objects.aggregate(Sum("retries"))["retries__sum"] or 0
    launched_runs = list(starts.values_list("run", "at"))
    counts["instances"] = Instance.objects.filter(status=InstanceStatus.STARTING).count()
    sides.must_be(len(launched_runs), counts["instances"])
    sides.must_be(len(cloud.machines()), counts["instances"])
    sides.must_be(len({run for run, _ in launched_runs}), counts["instances"])
    if urgent is not None:
        sides.must_be(counts["instances"], RUNS + 1)
        sides.must_be(launched_runs[place][0], urgent.pk)
        counts["the urgent launch after, s"] = round((launched_runs[place][1] - urgent.queued_at).total_seconds())
    if launched_runs:
        counts["the last launch after, s"] = round((launched_runs[-1][1] - began).total_seconds())
    counts["failed runs"] = Run.objects.filter(status__in=("failed", "terminated")).count()
    counts["runs that lost an attempt"] = Run.objects.filter(attempt__gt=1).count()
    counts["without offers"] = len(without_offers)
    return counts


def fetched_once(cloud: Any) -> list[dict[str, Any]]:
    """The requests for all sources, read once each."""
    from django.utils import timezone

    from dstackweb.offers import sources

    begin_anew(cloud)
    sources.refresh_due(timezone.now())
    calls: list[dict[str, Any]] = cloud.calls()
    return calls


def begin_anew(cloud: Any) -> None:
    """No runs, instances, limits or data of before."""
    from django.core.cache import caches

    from dstackweb.backends.aws import ami, client
    from dstackweb.backends.models import ApiCount, Instance
    from dstackweb.lib.models import Bucket, Circuit, Lease
    from dstackweb.offers import catalog, sources
    from dstackweb.runs.models import Job, Run

    for model in (Job, Run, Instance, ApiCount, Bucket, Circuit, Lease):
        model.objects.all().delete()
    a_backend().source_rows.all().delete()
    caches["offers"].clear()
    client._kept.clear()
    ami.forget()
    for module in (catalog, sources):
        module.forget()
    cloud.reset()
    cloud.times(boot_s=3600.0)
    for code in ("L-DB2E81BA", "L-3819A6DF"):
        cloud.quota(code, 1000)
    cloud.forget_calls()


def quotas_are_fresh(backend: Any) -> bool:
    """Whether the quotas of every region are as fresh as they should be."""
    from dstackweb.backends import registry
    from dstackweb.backends.contract import SourceKey, SourceState
    from dstackweb.offers import sources

    keys = [SourceKey("quotas", region) for region in REGIONS]
    driver: Any = registry.driver(backend)
    return all(reading.state is SourceState.FRESH for reading in sources.read_all(backend, driver, keys).values())


def a_backend() -> Any:
    """The AWS account."""
    from dstackweb.backends.models import Backend

    config = {"regions": list(REGIONS), "families": list(FAMILIES), "allow_private_url": True}
    return Backend.objects.get_or_create(name="aws", defaults={"kind": "aws", "config": config})[0]


def someone() -> tuple[Any, Any]:
    """A project and an admin of it."""
    from dstackweb.accounts.models import Project, User

    project, _ = Project.objects.get_or_create(name="main")
    user, _ = User.objects.get_or_create(username="ann", defaults={"is_superuser": True})
    return project, user


def submission(memory_gb: int, name: str = "", priority: int = 0) -> Any:
    """A run that asks for a GPU on AWS; what differs between runs is the memory they ask for."""
    from dstackweb.runs.services import Submission

    config = {
        "type": "task", "commands": ["true"], "backends": ["aws"], "spot_policy": "auto", "priority": priority,
        "resources": {"gpu": "A10G:1", "memory": f"{memory_gb}GB.."},
    }  # fmt: skip
    if name:
        config["name"] = name
    return Submission(config=config)


if __name__ == "__main__":
    if sides.here():
        measure()
    else:
        sides.on_each_side(sys.argv[1:])
