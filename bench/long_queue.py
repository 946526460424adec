"""What a long queue costs: passes, a priority change, a position, the first page; with 1k, 10k and 100k waiting runs.

    python bench/long_queue.py [SIZE …]

On SQLite in a folder of its own; on PostgreSQL (a new database, dropped afterwards) too when DATABASE_URL is set.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1_000, 10_000, 100_000)
SHAPES = 20
REPEATS = 7


def main(sizes: list[str]) -> None:
    """One process per side, since settings are read once."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
          f"milliseconds, median of {REPEATS} (least–most)\n")  # fmt: skip
    url = os.environ.pop("DATABASE_URL", "")
    _measure_apart(sizes, "")
    if url:
        _with_new_database(url, lambda fresh: _measure_apart(sizes, fresh))


def _measure_apart(sizes: list[str], url: str) -> None:
    with tempfile.TemporaryDirectory(prefix="dw-bench-") as home:
        env = {**os.environ, "DSTACKWEB_HOME": home, "DJANGO_SETTINGS_MODULE": "dstackweb.settings",
               "PYTHONPATH": str(ROOT), "BENCH_HERE": "1"}  # fmt: skip
        env |= {"DATABASE_URL": url} if url else {}
        subprocess.run([sys.executable, __file__, *sizes], env=env, check=True)


def _with_new_database(url: str, use: Callable[[str], None]) -> None:
    import psycopg

    name = f"dw_bench_{os.getpid()}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
        try:
            use(urlsplit(url)._replace(path=f"/{name}").geturl())
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


def measure(sizes: list[int]) -> None:
    """Prints the table of this process's database."""
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connection
    from django.test import Client

    from dstackweb.accounts.services import create_token
    from dstackweb.runs import selectors, services
    from dstackweb.runs.models import Queue, QueueCount, Run
    from dstackweb.scheduler.passes import run_passes
    from tests.factories import join, make_host, make_project, make_run, make_user

    call_command("migrate", verbosity=0)
    call_command("createcachetable", verbosity=0)
    project = make_project("main")
    member = join(project, make_user("ada"), "manager")
    make_host("large", cpus=50 * (REPEATS + 1) * len(sizes), memory_gib=4096)
    for index in range(8):
        make_host(f"box-{index}", cpus=64, memory_gib=512, gpus=8, draining=True)
    queue = services.ensure_queue(project)
    patterns = [make_run(project, member, resources={"cpu": 1, "gpu": f"H100:{2 + index}"}) for index in range(SHAPES)]
    token = create_token(member, "bench")[1]
    web = Client(headers={"Authorization": f"Bearer {token}", "Host": "localhost"})

    def fill(size: int) -> None:
        """Waiting runs of SHAPES shapes in turn, as if they had been submitted; then what autovacuum would do."""
        there = QueueCount.objects.get(queue=queue).submitted
        now = services.now_us()
        Run.objects.bulk_create(
            (
                Run(
                    project=project, queue=queue, user=member, name=f"bulk-{index}", shape=pattern.shape,
                    spec=pattern.spec, provenance=pattern.provenance, config_text=pattern.config_text,
                    seniority_us=now + index, rank=now + index - 50 * queue.step_us,
                )
                for index, pattern in ((index, patterns[index % SHAPES]) for index in range(there, size))
            ),
            batch_size=2000,
        )  # fmt: skip
        QueueCount.objects.filter(queue=queue).update(submitted=size)
        Queue.objects.filter(pk=queue.pk).update(last_seniority_us=now + size)
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("VACUUM ANALYZE")

    def place_50() -> Callable[[], object]:
        for _ in range(50):
            make_run(project, member, role="manager", priority=0)
        return lambda: _must_be(run_passes(), 50)

    def change_priority() -> Callable[[], object]:
        run = Run.objects.select_related("queue", "project", "user").filter(queue=queue).order_by("-rank")[100]
        return lambda: services.set_priority(run, member, "manager", 60 if run.priority == 50 else 50)

    def middle() -> Run:
        waiting = selectors.in_order(queue).select_related("queue", "project", "user")
        return waiting[QueueCount.objects.get(queue=queue).submitted // 2]

    def one_position() -> Callable[[], object]:
        run = middle()
        return lambda: selectors.position(run)

    def one_run() -> Callable[[], object]:
        name = middle().name
        return lambda: _must_be(web.get(f"/api/v1/projects/main/runs/{name}").status_code, 200)

    def page() -> Callable[[], object]:
        return lambda: _must_be(web.get("/api/v1/projects/main/queues/default?limit=50").status_code, 200)

    print(f"{connection.vendor}; {SHAPES} shapes; 9 hosts, 64 GPUs")
    print(f"{'':40}" + "".join(f"{size:>22,}" for size in sizes))
    rows: dict[str, Callable[[], Callable[[], object]]] = {
        "pass that places nothing": lambda: lambda: _must_be(run_passes(), 0),
        "pass that places 50 at the queue's end": place_50,
        "priority change": change_priority,
        "position of the run in the middle": one_position,
        "GET runs/{name}, in the middle": one_run,
        "GET queues/default?limit=50": page,
    }
    table: dict[str, list[str]] = {name: [] for name in rows}
    for size in sizes:
        fill(size)
        run_passes()
        for name, prepare in rows.items():
            table[name].append(_cell([_timed(prepare()) for _ in range(REPEATS)]))
    for name, cells in table.items():
        print(f"{name:40}" + "".join(f"{cell:>22}" for cell in cells))
    print()


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def _must_be(found: object, wanted: object) -> None:
    assert found == wanted, f"{found} instead of {wanted}"


if __name__ == "__main__":
    if os.environ.get("BENCH_HERE"):
        measure([int(size) for size in sys.argv[1:]] or list(SIZES))
    else:
        main(sys.argv[1:])
