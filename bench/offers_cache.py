"""What looks at offers cost: calls of the backend for twenty at once, and a hit, on both databases with their caches.

    python -m bench.offers_cache [sqlite|postgres] [OFFERS]

The database cache goes with SQLite, Redis with PostgreSQL. The floor of a hit is one bare read of a small key.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from bench import sides

REQUESTS = 20
REGIONS = ("eu-west-1", "us-east-1")
SOURCES = {"types": 43200.0, "prices": 43200.0, "spot": 300.0, "quotas": 600.0}
"""TTLs in seconds."""
CALL_S = 0.2
"""What the cloud takes to answer."""
HITS = 5000


def measure(number: int) -> None:
    """Prints the tables of this process's side."""
    import django

    django.setup()
    from django.core.cache import caches
    from django.core.management import call_command

    from dstackweb.backends import registry
    from dstackweb.backends.contract import Availability, Offer, SourceKey, SourceReading, SourceSpec
    from dstackweb.backends.models import Backend
    from dstackweb.offers import catalog, source_rows, sources, store
    from dstackweb.spec.effective import Requirements
    from tests.backends.kinds import kind_with

    call_command("migrate", verbosity=0)
    log = Path(tempfile.mkdtemp(dir=os.environ["DSTACKWEB_HOME"]), "calls")

    def call(what: str) -> None:
        with open(log, "ab", buffering=0) as file:
            file.write(f"{what}\n".encode())
        time.sleep(CALL_S)

    def offers(backend: Backend, count: int, requirements: Requirements) -> list[Offer]:
        return [
            Offer(
                backend.name, f"g5.{index}", 4, 16384, Availability.UNKNOWN, REGIONS[index % 2], "A10G", 1, 24576,
                price=Decimal(index), detail={"code": "quota", "fits": requirements.cpu_min, "limit": 64, "used": 0},
            )
            for index in range(count)
        ]  # fmt: skip

    class Sourced:
        sources = {name: SourceSpec(ttl_s, list[int]) for name, ttl_s in SOURCES.items()}

        def __init__(self, backend: Backend) -> None:
            self.backend = backend

        def wanted(self) -> list[SourceKey]:
            return [SourceKey(source, region) for source in SOURCES for region in REGIONS]

        def fetch(self, key: SourceKey) -> Any:
            call(f"{key}")
            return list(range(number))

        def join(
            self, readings: Mapping[SourceKey, SourceReading], requirements: Requirements, *, image: str | None = None
        ) -> Sequence[Offer]:
            sides.must_be({reading.state.value for reading in readings.values()}, {"fresh"})
            return offers(self.backend, number, requirements)

    class Plain:
        def __init__(self, backend: Backend) -> None:
            self.backend = backend

        def offers(self, requirements: Requirements, *, image: str | None = None) -> Sequence[Offer]:
            call("offers")
            return offers(self.backend, number, requirements)

    registry.KINDS.update({"aws": kind_with("aws", Sourced), "dask": kind_with("dask", Plain)})
    aws = Backend.objects.create(name="cloud", kind="aws")
    dask = Backend.objects.create(name="cluster", kind="dask")
    few = Requirements(cpu_min=1)

    def from_sources(cpus: int) -> None:
        """A look by someone who would have every source asked that is not known."""
        at_once([lambda key=key: sources.refresh(aws, key, wait_s=30) for key in Sourced(aws).wanted()])
        sides.must_be(len(catalog.CachedDriver(aws).offers(Requirements(cpu_min=cpus))), number)

    def by_itself(cpus: int) -> None:
        sides.must_be(len(catalog.CachedDriver(dask, wait_s=30).offers(Requirements(cpu_min=cpus))), number)

    def calls(look: Callable[[int], None], processes: int, *, same: bool) -> str:
        """Calls for twenty looks, in so many processes, at once: with nothing known, and again."""
        for module in (catalog, sources):
            module.forget()
        for backend in (aws, dask):
            backend.source_rows.all().delete()
            backend.results.all().delete()
            store.restamp(source_rows.catalog_name(backend.pk))
        found = []
        for _ in ("cold", "warm"):
            log.write_bytes(b"")
            each = REQUESTS // processes
            in_processes([
                [lambda cpus=1 if same else 1 + (process * each + index) % 8: look(cpus) for index in range(each)]
                for process in range(processes)
            ])  # fmt: skip
            found.append(len(log.read_text().splitlines()))
        return f"{found[0]} / {found[1]}"

    rows = {
        f"{what}, {wanted} requirements": [calls(look, processes, same=wanted == "the same") for processes in (1, 4)]
        for what, look in {f"{len(SOURCES) * len(REGIONS)} sources": from_sources, "no sources": by_itself}.items()
        for wanted in ("the same", "8 different")
    }
    sides.table(f"{sides.database()}, calls of {REQUESTS} looks, cold / warm:", ["1 process", "4 processes"], rows)

    driver, name = catalog.CachedDriver(aws), source_rows.catalog_name(aws.pk)
    from_sources(1)
    cache = caches["offers"]
    acts: dict[str, Callable[[], object]] = {
        "one bare read of the cache (floor)": lambda: cache.get(name),
        f"a hit, {number:,} offers": lambda: driver.offers(few),
        f"a hit of a new driver, {number:,} offers": lambda: catalog.CachedDriver(aws).offers(few),
    }
    cells = {what: percentiles(act, HITS) for what, act in acts.items()}

    def begin_anew() -> None:
        catalog.forget()
        driver.offers(few)

    cells["the first look of a process, kept by another"] = percentiles(begin_anew, 30)
    cells["putting them together from kept sources"] = percentiles(
        lambda: (store.restamp(name), driver.offers(few)), 30
    )
    kind = type(cache).__name__
    sides.table(f"{kind}, microseconds:", ["median", "99 %", "worst"], cells)


def percentiles(act: Callable[[], object], times: int) -> list[str]:
    """Cells: the median, what 99 of 100 stay under, and the worst, in microseconds."""
    act()
    values = sorted(sides.timed(act) * 1000 for _ in range(times))
    return [f"{value:,.0f}" for value in (statistics.median(values), values[int(len(values) * 0.99)], values[-1])]


def at_once(acts: Sequence[Callable[[], object]]) -> None:
    """Each in a thread of its own; none may fail."""
    from django.db import connections

    failed: list[BaseException] = []

    def run(act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def in_processes(acts: Sequence[Sequence[Callable[[], object]]]) -> None:
    """Each list in a process of its own, all of it at once; in this one if there is one list."""
    from django.db import connections

    if len(acts) == 1:
        return at_once(acts[0])
    connections.close_all()
    pids = []
    for mine in acts:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                at_once(mine)
                code = 0
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
            finally:
                os._exit(code)
        pids.append(pid)
    sides.must_be([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], [0] * len(pids))


if __name__ == "__main__":
    if sides.here():
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
    else:
        sides.on_each_side(sys.argv[1:])
