"""Who got the GPUs that a policy gave back: told on the run that was stopped, and in the ledger."""

from __future__ import annotations

import datetime as dt

from django.db import transaction

from dstackweb.gpus.models import PolicyStop
from dstackweb.runs.models import Allocation
from dstackweb.runs.transitions import lock_run, record

RECENT = dt.timedelta(hours=24)
"""After so long nobody wonders any more who was next."""


def note_next(now: dt.datetime) -> int:
    """Look who holds GPUs of recent stops now; returns of how many stops the next run was found.

    What a pass that died didn't note, the next one finds in the same rows.
    """
    stops = PolicyStop.objects.filter(observed=False, next_run=None, run__isnull=False, at__gt=now - RECENT)
    waiting = list(stops.select_related("run").defer("run__spec", "run__config_text", "run__provenance"))
    if not waiting:
        return 0
    freed = {uuid for stop in waiting for uuid in stop.gpus}
    held = list(
        Allocation.objects.filter(gpu__uuid__in=freed)
        .select_related("gpu", "job__run")
        .defer("job__run__spec", "job__run__config_text", "job__run__provenance")
        .order_by("job__placed_at", "pk")
    )
    return sum(_note(stop, held) for stop in waiting)


def _note(stop: PolicyStop, held: list[Allocation]) -> bool:
    """Note the first that holds a GPU of this stop's, once."""
    gpus = set(stop.gpus)
    for allocation in held:
        job = allocation.job
        if allocation.gpu is None or allocation.gpu.uuid not in gpus:
            continue
        if job.run_id == stop.run_id or job.placed_at < stop.at or stop.run is None:
            continue
        with transaction.atomic():
            run = lock_run(stop.run.pk)
            won = PolicyStop.objects.filter(pk=stop.pk, next_run=None).update(next_run=job.run, next_at=job.placed_at)
            if won:
                # To whom another project's run is hidden its name is, too.
                mine = job.run.project_id == stop.project_id
                record(run, "utilization_next", {"run": job.run.name} if mine else {}, attempt=stop.attempt)
        return bool(won)
    return False
