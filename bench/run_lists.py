"""Lists of a project's runs by status, member, queue, name and date, in a long history.

python -m bench.run_lists [sqlite|postgres] [SIZE …]
"""

from __future__ import annotations

import datetime as dt
import random
import sys
from collections.abc import Callable
from typing import Any

from bench import sides

SIZES = (1_000, 10_000, 100_000)
REPEATS = 7
DAYS = 90
"""Over so long the runs were submitted, evenly."""
MEMBERS, QUEUES = 20, 3
ENDS = ("done",) * 80 + ("failed",) * 15 + ("terminated",) * 5
API = "/api/v1/projects/main/runs"
PAGE = "/p/main/runs/"


def measure(sizes: list[int]) -> None:
    """Prints the table of this process's database."""
    import django

    django.setup()
    from django.test import Client
    from django.utils import timezone

    from bench.filled import Filled
    from dstackweb.accounts.services import create_token
    from dstackweb.runs.models import Queue, Run
    from tests.factories import count_runs_anew, join, make_user

    filled, now, rng = Filled(room=8), timezone.now(), random.Random(7)
    members = [join(filled.project, make_user(f"member-{index}"), "member") for index in range(MEMBERS)]
    rare = join(filled.project, make_user("rare"), "member")
    queues = [Queue.objects.create(project=filled.project, name=f"queue-{index}") for index in range(QUEUES)]
    web = Client(headers={"Host": "localhost"})
    web.force_login(filled.ada)
    program = Client(headers={"Host": "localhost", "Authorization": f"Bearer {create_token(filled.ada, 'bench')[1]}"})

    def ended(number: int, size: int) -> Run:
        pattern, status = filled.patterns[number % len(filled.patterns)], rng.choice(ENDS)
        at = now - dt.timedelta(days=DAYS * (1 - number / size))
        return Run(
            project=filled.project, queue=rng.choice(queues), user=rare if number == 0 else rng.choice(members),
            name=f"{'first' if number == 0 else 'train'}-{size}-{number}", status=status, shape=pattern.shape,
            spec=pattern.spec, provenance=pattern.provenance, config_text=pattern.config_text, seniority_us=number,
            rank=number, submitted_at=at, queued_at=at, started_at=at, ended_at=at + dt.timedelta(minutes=30),
        )  # fmt: skip

    def fill(size: int) -> None:
        """So many ended runs, of which the oldest is the one of the member `rare`, and of its name."""
        Run.objects.filter(queue__in=queues).delete()
        Run.objects.bulk_create((ended(number, size) for number in range(size)), batch_size=2000)
        count_runs_anew()
        sides.settle()

    def get(client: Any, path: str) -> Callable[[], Callable[[], object]]:
        return lambda: lambda: sides.must_be(client.get(path).status_code, 200)

    first_day = (now - dt.timedelta(days=DAYS - 1)).date().isoformat()
    rows = {
        "API: all": get(program, API),
        "one status": get(program, f"{API}?status=failed"),
        "a member": get(program, f"{API}?user=member-3"),
        "a member with one run, the oldest": get(program, f"{API}?user=rare"),
        "a member's of one status: none": get(program, f"{API}?user=rare&status=terminated"),
        "a queue's of one status": get(program, f"{API}?queue=queue-1&status=failed"),
        "a name that one run has, the oldest": get(program, f"{API}?q=first"),
        "a name that none has": get(program, f"{API}?q=nothing"),
        "page: all": get(web, PAGE),
        "page: one status": get(web, f"{PAGE}?status=failed"),
        "page: a day 89 days ago": get(web, f"{PAGE}?from={first_day}&to={first_day}"),
        "page: a name that none has": get(web, f"{PAGE}?q=nothing"),
    }
    found: dict[str, list[str]] = {name: [] for name in rows}
    for size in sizes:
        fill(size)
        for name, prepare in rows.items():
            prepare()()  # what is read once for each process
            found[name].append(sides.measured(prepare, REPEATS))
    sides.table(f"{sides.database()}; ms", [f"{size:,} ended runs" for size in sizes], found)


if __name__ == "__main__":
    if sides.here():
        measure([int(size) for size in sys.argv[1:]] or list(SIZES))
    else:
        sides.on_each_side(sys.argv[1:])
