"""Machines full of GPUs, as the pages of GPUs and hosts show them: busy, idle, hot, lost, used by somebody else."""

from __future__ import annotations

import datetime as dt

from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.backends.models import Gpu, Host, HostEvent
from dstackweb.gpus import intake
from dstackweb.lib.times import to_ms
from dstackweb.runner.nvml import Snapshot
from dstackweb.runs.models import Job
from tests.browser.demo import PASSWORD
from tests.browser.scene import once
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.gpus.snapshots import sample

BACK_S = 2400
HELD_BACK, IDLE = 0x40, 0x1
DOES = {  # at each GPU of the two machines: utilization, MiB, W, °C, and what holds its clocks down
    "box-1": [(96, 70_000, 395, 74, 0), (93, 70_000, 388, 71, 0), (88, 62_000, 371, 88, HELD_BACK),
              (41, 30_000, 210, 61, 0), (3, 12_000, 95, 41, 0), (17, 9_000, 130, 45, 0), (0, 4, 61, 33, IDLE),
              (None, 4, 60, 33, IDLE)],
    "box-2": [(64, 20_000, 240, 66, 0), (71, 41_000, 310, 69, 0), (28, 5_000, 140, 52, 0), (0, 4, 60, 31, IDLE)],
}  # fmt: skip


@once
def build() -> Project:
    """Two machines with twelve GPUs, runs on most of them, and forty minutes of samples."""
    project, other = make_project("main"), make_project("other")
    ann = join(project, make_user("ann", password=PASSWORD))
    join(project, make_user("mia", password=PASSWORD, is_staff=True, is_superuser=True), "admin")
    eve = join(other, make_user("eve"))
    make_host("box-1", cpus=64, memory_gib=512, gpus=8, labels={"site": "lab"})
    for name, gpus in (("train-llama-sft", 3), ("notebook-try", 2)):
        _running(make_run(project, ann, name, resources={"gpu": gpus}))
    _running(make_run(other, eve, "their-own", resources={"gpu": 1}))
    make_host("box-2", cpus=32, memory_gib=256, gpus=4)
    Gpu.objects.filter(uuid="GPU-box-2-2").update(stranger={"user": "carl", "pid": 4711})
    for name in ("box-1", "box-2"):
        for ago_s in range(BACK_S, -1, -20):
            seen(name, ago_s)
    host = Host.objects.get(name="box-2")
    HostEvent.objects.create(host=host, kind="offline", at=timezone.now() - dt.timedelta(hours=4))
    HostEvent.objects.create(host=host, kind="online", at=timezone.now() - dt.timedelta(hours=3))
    Gpu.objects.create(host=host, uuid="GPU-box-2-9", index=9, name="NVIDIA A100", memory_mib=81920, present=False)
    plain = make_host("cpu-box-3")
    intake.add_snapshot(plain, Snapshot((), library=False), to_ms(timezone.now()))
    return project


def _running(run: object) -> None:
    place_all()
    job = start(placed_job(run))
    Job.objects.filter(pk=job.pk).update(started_at=timezone.now() - dt.timedelta(seconds=BACK_S - 300))


def seen(name: str, ago_s: int = 0, **changed: int) -> None:
    """A look at all GPUs of a machine; `g3=99` has one do something else."""
    readings = []
    for index, (used, memory, power, heat, bits) in enumerate(DOES[name]):
        used = changed.get(f"g{index}", used)
        if used is not None and used > 5:
            used = max(0, min(100, used + (ago_s // 20 * 37 + index * 11) % 9 - 4)) if ago_s else used
        processes = ({"pid": 8000 + index, "user": "ann", "memory_mib": memory},) if memory > 100 else ()
        readings.append(
            sample(f"GPU-{name}-{index}", used, memory_used_mib=memory, power_w=power, temperature_c=heat,
                    throttle=bits, processes=processes)
        )  # fmt: skip
    error = "GPU 9: GPU is lost" if name == "box-2" else ""
    look = Snapshot(tuple(readings), took_ms=3.4, error=error)
    intake.add_snapshot(Host.objects.get(name=name), look, to_ms(timezone.now()) - ago_s * 1000)
