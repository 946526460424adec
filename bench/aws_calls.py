"""What AWS is asked, over HTTP: for twenty runs submitted at once, and while it throttles for twenty minutes.

    python -m bench.aws_calls [sqlite|postgres]

The AWS is the small one of standins/aws. Minutes of throttling are simulated: the clock that the code reads
is moved by 5 s between ticks, while calls, repeats and their waits are real. The database cache goes with SQLite, Redis
with PostgreSQL.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import sys
import time
from collections import Counter
from typing import Any

from bench import sides
from bench.offers_cache import in_processes

RUNS = 20
REGIONS = ("eu-west-1", "us-east-1")
FAMILIES = ("g5", "g6", "p4d", "p5")
STEP_S, MINUTES = 5, 20
SOURCES = ("instance_types", "prices", "spot_prices", "quotas")

moved = dt.timedelta(0)


def move_the_clock() -> None:
    """Everything that reads Django's clock from here on reads one that is ahead by `moved`."""
    from django.utils import timezone

    real = timezone.now
    timezone.now = lambda: real() + moved


def measure() -> None:
    """Prints the tables of this process's side."""
    import django

    os.environ["DSTACKWEB_PUBLIC_URL"] = "https://gpus.example.org"
    move_the_clock()
    django.setup()
    from django.core.management import call_command

    logging.disable(logging.WARNING)
    call_command("migrate", verbosity=0)
    from standins.aws import Cloud

    cloud = Cloud.start()
    os.environ |= cloud.env
    try:
        twenty_at_once(cloud)
        throttled(cloud)
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


def submission(gpus: int, name: str = "") -> Any:
    """A run that asks for a GPU on AWS; what differs between runs is the memory they ask for."""
    from dstackweb.runs.services import Submission

    config = {
        "type": "task", "commands": ["true"], "backends": ["aws"], "spot_policy": "auto",
        "resources": {"gpu": "A10G:1", "memory": f"{gpus}GB.."},
    }  # fmt: skip
    if name:
        config["name"] = name
    return Submission(config=config)


if __name__ == "__main__":
    if sides.here():
        measure()
    else:
        sides.on_each_side(sys.argv[1:])
