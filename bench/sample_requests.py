"""What the web request costs that brings the samples of a joined host, each GPU with a running job under a policy.

python -m bench.sample_requests [sqlite|postgres] [GPUS …]

In the last row every run has been idle for its whole window: samples are stored in the request, and judged after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from bench import sides

SIZES = (8, 64, 256)
REPEATS = 15


def measure(sizes: list[int]) -> None:
    """Prints the table of this process's database."""
    import datetime as dt

    import django

    django.setup()
    from django.db.models import F
    from django.test import Client
    from django.test.utils import override_settings

    from bench.watched import Watched
    from dstackweb.backends.models import Host
    from dstackweb.gpus.models import GpuSeries, JobPolicy
    from dstackweb.lib.secrets import digest
    from dstackweb.runs.models import Job, Run

    rows: dict[str, list[str]] = {}
    watched = Watched(sizes[0])
    for number, size in enumerate(sizes):
        watched.per_host, watched.started = size, watched.started - dt.timedelta(hours=1)
        watched.grow(sum(sizes[: number + 1]))
        host = watched.hosts[-1]
        token = f"token-of-{host.name}"
        Host.objects.filter(pk=host.pk).update(token_digest=digest(token), runs_dir="/runs")
        client = Client(headers={"Authorization": f"Bearer {token}"})
        gpus = [
            {"uuid": f"GPU-{host.name}-{index}", "index": index, "name": "A100", "memory_mib": 81920, "utilization": 3}
            for index in range(size)
        ]

        def poll(gpus: Any, name: str = host.name, client: Client = client) -> Callable[[], object]:
            body = {"jobs": {}, "samples": [{"age_s": 0, "gpus": gpus}] if gpus else []}
            url = f"/api/v1/runner/hosts/{name}/poll"
            return lambda: sides.must_be(client.post(url, body, "application/json").status_code, 200)

        def overdue(host: Any = host, gpus: Any = gpus) -> Callable[[], object]:
            jobs = Job.objects.filter(host=host)
            Run.objects.filter(jobs__in=jobs).update(status="running", stop_reason="")
            jobs.update(status="running", stop_reason="", stop_grace_s=None)
            JobPolicy.objects.filter(job__in=jobs).update(noticed_ms=None, acted_ms=None)
            GpuSeries.objects.filter(job__in=jobs).update(low_since_ms=F("low_last_ms") - 45 * 60_000)
            return poll(gpus)

        with override_settings(ALLOWED_HOSTS=["*"]):
            poll(gpus)()
            cells = {
                "a poll without a sample": sides.measured(lambda poll=poll: poll([]), REPEATS),
                "with a sample of each GPU": sides.measured(lambda poll=poll, gpus=gpus: poll(gpus), REPEATS),
                "the same, every run overdue": sides.measured(overdue, 3),
            }
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    sides.table(f"{sides.database()}, ms of a request:", [f"{size} GPUs" for size in sizes], rows)


if __name__ == "__main__":
    if sides.here():
        measure([int(size) for size in sys.argv[1:]] or list(SIZES))
    else:
        sides.on_each_side(sys.argv[1:])
