"""What the queue page costs with sweeps of 10,000 runs in it, folded and expanded, on SQLite and on PostgreSQL.

    python -m bench.folded_queue [sqlite|postgres]

Pages through Django's test client, so without the network. Milliseconds: the median, and the least and the most.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable

from bench import sides

REPEATS = 15
SIZE = 10_000
LONG = 10_000


def measure() -> None:
    """Prints the table of this process's database."""
    import django

    django.setup()
    from django.test import Client

    from bench.filled import Filled
    from dstackweb.runs.models import Sweep
    from dstackweb.runs.services import Submission
    from dstackweb.runs.sweeps import services as sweeps

    there = Filled(room=1)
    browser = Client(headers={"Host": "localhost"})
    browser.force_login(there.ada)

    def submit(number: int) -> None:
        for _ in range(number):
            config = {"type": "task", "commands": ["x"], "array": SIZE, "resources": {"gpu": 8, "cpu": 8}}
            sweeps.submit(there.project, there.ada, "manager", Submission(config))
        sides.settle()

    def stop() -> None:
        for sweep in Sweep.objects.filter(ended_at=None):
            sweeps.stop(sweep, there.ada, "manager")

    def page(query: str = "") -> str:
        def prepare() -> Callable[[], object]:
            return lambda: sides.must_be(browser.get(f"/p/main/queue/{query}").status_code, 200)

        return sides.measured(prepare, REPEATS)

    found: dict[str, list[str]] = defaultdict(list)
    for size in (50, LONG):
        there.fill(size)
        last = f"?page={size // 40 + 1}"
        found["without a sweep"].append(page())
        found["without a sweep, the last page"].append(page(last))
        submit(1)
        found["with a sweep"].append(page())
        found["with a sweep, the last page"].append(page(last))
        found["with a sweep, expanded"].append(page("?expand=all"))
        submit(19)
        found["with 20 sweeps"].append(page())
        stop()
    sides.table(f"{sides.database()}; sweeps of {SIZE:,} runs", [f"{size:,} other runs" for size in (50, LONG)], found)


if __name__ == "__main__":
    if sides.here():
        measure()
    else:
        sides.on_each_side(sys.argv[1:])
