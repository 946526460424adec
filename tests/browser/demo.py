"""A deployment that has everything a page can show: what screenshots and accessibility checks look at."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import random
import struct
import zlib
from typing import Any, TypeVar

from django.db.models import F
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu, Host
from dstackweb.lib.secrets import encrypt
from dstackweb.notifications import channels
from dstackweb.notifications.models import Channel, ChannelKind
from dstackweb.notifications.services import EVENTS, RuleScope, bell_of, set_rules
from dstackweb.runs import artifacts, attempts, holds, logs, services
from dstackweb.runs.codes import PlaceEnd
from dstackweb.runs.history import SLOT, hour_of, slot_of
from dstackweb.runs.models import (
    Job,
    PastPlace,
    PastVerdict,
    QueueHour,
    QueueSlot,
    QueueSpan,
    Run,
    Sweep,
    UsageDay,
    Verdict,
)
from dstackweb.runs.notification_codes import DeliveryProblem
from dstackweb.runs.queue import ordering, queues, reorder
from dstackweb.runs.queue.move_preview import MoveTarget
from dstackweb.runs.states import Reason, RunStatus
from dstackweb.runs.sweeps import creation, services as sweeps
from dstackweb.runs.transitions import move_run
from dstackweb.runs.wait_stats import BUCKETS, bucket_of
from tests.browser import task_demo
from tests.browser.scene import once
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.web.watched import see

S = TypeVar("S", bound=QueueSpan)
PASSWORD = "correct horse battery"


def ended(run: Run, reason: str, **shown: object) -> Run:
    """A placed run at its end."""
    attempts.end_job(start(placed_job(run)).pk, reason, **shown)
    return run


def _log(run: Run) -> None:
    lines = [
        f"step {step:,} loss {1.85 - step / 90000:.4f} lr 9.6e-05 tok/s 41,2{step % 90:02d}"
        for step in range(18300, 18445, 10)
    ]
    text = "\n".join(
        [
            "loading tokenizer",
            *lines,
            "\x1b[33mW dataloader worker 3 is slow (11.2 s)\x1b[0m",
            "saved checkpoint ckpt-18440",
        ]
    )
    logs.append_log(placed_job(run).pk, 0, f"{text}\n".encode())


def _seen(job: Job, began: dt.datetime) -> None:
    """As if it had begun then; its second GPU has done next to nothing for a quarter of an hour."""
    Job.objects.filter(pk=job.pk).update(placed_at=began, started_at=began)
    Run.objects.filter(pk=job.run_id).update(started_at=began)
    see(placed_job(job.run), began, lambda place, ago_s: 2 if place == 1 and ago_s < 880 else 84 + ago_s // 10 % 13)


def _picture(width: int = 480, height: int = 240) -> bytes:
    """A falling curve as a PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    curve = [round(height * (0.9 - 0.8 * math.exp(-x / 120))) for x in range(width)]
    rows = (
        b"\0" + b"".join(b"\x20\x6b\xc4" if abs(curve[x] - y) < 2 else b"\xf6\xf8\xfb" for x in range(width))
        for y in range(height)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        [b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(b"".join(rows))), chunk(b"IEND", b"")]
    )


def _artifacts(run: Run) -> None:
    steps = "".join(f"{step},{1.85 - step / 90000:.4f},9.6e-05\n" for step in range(0, 18300, 50))
    left = {
        "metrics.csv": f"step,loss,lr\n{steps}".encode(),
        "plots/loss.png": _picture(),
        "report.html": b"<h1>Report</h1>\n<p>Perplexity 6.31 on the held-out set.</p>\n",
        "adapter.safetensors": bytes(300_000),
    }
    job = placed_job(run)
    for path, data in left.items():
        file = artifacts.Offered(path, len(data), hashlib.sha256(data).hexdigest())
        assert artifacts.take(job.pk, file, 0, data).done
    artifacts.note_left_out(job.pk, [{"path": "optimizer.pt", "why": "file_limit", "size": 3 << 30}], 1)


@once
def build() -> tuple[Project, User]:
    """Hosts, members and runs of every status; returns the project and its manager."""
    project = make_project("main")
    mia = join(project, make_user("mia", password=PASSWORD, is_staff=True), "admin")
    set_rules(bell_of(mia), dict.fromkeys(EVENTS, RuleScope(own=False)))
    _channels(project, mia)
    ann, bo = join(project, make_user("ann")), join(project, make_user("bo"))
    join(make_project("research"), mia, "admin")
    make_user("root", password=PASSWORD, is_staff=True, is_superuser=True)
    make_host("gpu-box-1", cpus=64, memory_gib=512, gpus=5, labels={"site": "lab", "nvlink": "yes"})
    make_host("cpu-box-2", cpus=16, memory_gib=64, draining=True)
    old = make_host("old-box-3", cpus=8, memory_gib=32, gpus=1, error="no space left on the runs' disk")
    now = timezone.now()
    Host.objects.filter(pk=old.pk).update(silent_s=9999, seen_at=now - dt.timedelta(hours=3), isolation="none")
    Gpu.objects.filter(uuid="GPU-gpu-box-1-3").update(stranger={"user": "carl", "pid": 4711})

    for name, user, reason, shown in (
        ("tokenize-shard-7", ann, "done_by_runner", {"exit_code": 0}),
        ("export-onnx", bo, "container_exited_with_error", {"exit_code": 127, "message": "python3.12: not found"}),
        ("eval-nightly", ann, "max_duration_exceeded", {}),
    ):
        run = make_run(project, user, name, resources={"cpu": 2})
        place_all()
        ended(run, reason, **shown)
    stopped = make_run(project, bo, "notebook-try")
    services.stop(stopped, bo, "member")

    llama = make_run(
        project, mia, "train-llama-sft", role="admin", priority=70,
        resources={"cpu": 8, "memory": "64GB", "gpu": "A100:80GB:2"},
        env={"LR": "1e-4"}, retry={"on_events": ["interruption"], "duration": "4h"}, max_duration="12h",
        utilization_policy={"min_gpu_utilization": 30, "time_window": "20m"},
    )  # fmt: skip
    place_all()
    _seen(start(placed_job(llama)), now - dt.timedelta(minutes=32))
    _log(llama)
    _artifacts(llama)
    task_demo.fill(llama)
    held = holds.submit_hold(project, mia, "admin", holds.HoldRequest("3h", gpu="A100:1", name="hold-swift-otter"))
    place_all()
    start(placed_job(held))
    make_run(project, ann, "report-nightly", schedule={"cron": "0 2 * * *"})
    starting = make_run(project, ann, "pretrain-ablation", resources={"gpu": 1})
    place_all()
    assert placed_job(starting)
    retried = make_run(project, bo, "sweep-lr-0029", retry=True, commands=["false"])
    place_all()
    ended(retried, "container_exited_with_error", exit_code=1, message="the first command that failed: false")

    make_run(project, mia, "hotfix-serving", role="admin", priority=90, resources={"gpu": "A100:80GB:2"})
    make_run(project, ann, "ab-reranker-7", priority=70, resources={"gpu": 2})
    for number in range(30, 34):
        make_run(project, bo, f"sweep-lr-00{number}", resources={"gpu": 1})
    make_run(project, ann, "evaluate-checkpoint-of-the-long-named-experiment", nodes=2, resources={"gpu": 4})
    make_run(project, bo, "too-large", priority=30, resources={"gpu": 16})
    place_all()
    for hours, run in enumerate(Run.objects.filter(status="submitted").order_by("-id"), start=1):
        _submitted(run, now - dt.timedelta(hours=hours * 3, minutes=7))
    moved, before = (Run.objects.get(name=name) for name in ("sweep-lr-0033", "sweep-lr-0031"))
    reorder.move([moved], mia, "admin", MoveTarget("before", before))
    _waited(now)
    past(project, now)
    queues.change_queue(
        services.ensure_queue(project, "night"), mia, "admin", paused=True, ageing_minutes=None, max_gpus=2
    )
    return project, mia


def sweep(project: Project, user: User) -> Sweep:
    """A sweep in the paused queue, of which most is to come."""
    config = {
        "type": "task", "name": "lr-grid", "queue": "night", "commands": ["python train.py"],
        "array": {
            "matrix": {"LEARNING_RATE": [0.1, 0.03, 0.01, 0.003], "SEED": list(range(1, 11))}, "max_parallel": 12
        },
    }  # fmt: skip
    found, _made = sweeps.submit(project, user, "admin", services.Submission(config))
    assert isinstance(found, Sweep)
    now = timezone.now()
    for index, minutes in enumerate((38, 3, 41, 40, 36, 39, 4, 37, 42, None, None)):
        run = Run.objects.get(name=f"lr-grid-{index}")
        began = now - dt.timedelta(minutes=43 - index)
        move_run(run, RunStatus.PROVISIONING, now=began)
        move_run(run, RunStatus.RUNNING, now=began)
        if minutes is None:
            continue
        status, reason, code, message = RunStatus.DONE, Reason.ALL_JOBS_DONE, 0, ""
        if minutes < 10:
            status, reason, code = RunStatus.FAILED, Reason.JOB_FAILED, 1
            message = "Exit code 1: loss is NaN in step 1,204."
        ended_at = min(now, began + dt.timedelta(minutes=minutes))
        move_run(run, status, now=ended_at, termination_reason=reason, exit_code=code, status_message=message)
    creation.settle(timezone.now())
    return found


CHANNEL = 9001
"""The number of a channel with a log, in addresses."""


def _channels(project: Project, mia: User) -> None:
    """A person's and a project's, with deliveries that arrived, wait and failed."""
    url = "https://hooks.example.org/services/T1/B2/c3"
    Channel.objects.create(pk=CHANNEL, user=mia, kind=ChannelKind.WEBHOOK, name="my program", url=encrypt(url))
    channel = Channel.objects.get(pk=CHANNEL)
    set_rules(channel, {event: RuleScope(own=True) for event in list(EVENTS)[:2]})
    tried = (
        {"status": "sent", "answer": 204, "attempts": 1},
        {"status": "failed", "answer": 500, "attempts": 12, "problem": DeliveryProblem.ANSWER},
        {"status": "unknown", "attempts": 1, "problem": DeliveryProblem.NO_ANSWER},
        {"status": "waiting", "attempts": 2, "problem": DeliveryProblem.UNREACHABLE},
    )
    for values in tried:
        one = channels.send_test(channel, mia)
        channel.deliveries.filter(pk=one.pk).update(**values)
    off = channels.create(project, ChannelKind.SLACK, "#gpu-alerts", url)
    channels.create(project, ChannelKind.TEAMS, "On call", url)
    channels.turn(off, False)


def _submitted(run: Run, at: dt.datetime) -> None:
    """As if it had been submitted then; older runs must stay the older ones."""
    seniority = round(at.timestamp() * 1_000_000)
    rank = ordering.rank(seniority, run.priority, run.queue.step_us)
    Run.objects.filter(pk=run.pk).update(
        submitted_at=at, queued_at=at, place_since=at, seniority_us=seniority, rank=rank
    )


def _waited(now: dt.datetime) -> None:
    """As if today's runs had waited for hours, for the same reasons, until half an hour ago."""
    hours = [now - dt.timedelta(hours=back) for back in range(5)]
    Verdict.objects.update(logged_at=hours[4])
    PastPlace.objects.filter(ended_by=PlaceEnd.MOVED).delete()
    Run.objects.filter(status="submitted").update(place_since=F("queued_at"))
    llama, like = (Run.objects.get(name=name) for name in ("train-llama-sft", "hotfix-serving"))
    began = now - dt.timedelta(minutes=32)
    Run.objects.filter(pk=llama.pk).update(submitted_at=hours[3], queued_at=hours[3])
    PastPlace.objects.filter(run_id=llama.pk).update(since=hours[3], queued_at=hours[3], until=began)
    why = Verdict.objects.get(queue=like.queue, shape=like.shape)
    PastVerdict.objects.create(
        queue=llama.queue, shape=llama.shape, since=hours[3], until=began, reason=why.reason, data=why.data
    )
    began, over = hours[4], now - dt.timedelta(minutes=20)
    export = Run.objects.filter(name="export-onnx")
    export.update(submitted_at=began, queued_at=began, started_at=began, ended_at=over)
    Job.objects.filter(run__in=export).update(placed_at=began, started_at=began, ended_at=over)


def _bands(model: type[S], rnd: random.Random, load: float, runs: float, **of: Any) -> list[S]:
    """A span of a queue: so many runs start in a usual band."""
    rows = []
    for band, (share, typical_s) in enumerate(((0.5, 9 * 3600), (1.0, 4 * 3600), (5.0, 2400), (1.2, 300))):
        placed = int(rnd.expovariate(1 / (runs * load * share)))
        waits = [int(rnd.lognormvariate(math.log(typical_s * (0.3 + load)), 0.7)) for _ in range(placed)]
        length = int(12 * load * share * rnd.uniform(0.5, 1.2))
        row = model(
            band=band, placed=placed, wait_s=sum(waits), wait_max_s=max(waits, default=0),
            length=length, length_max=length + rnd.randrange(4), **of,
        )  # fmt: skip
        for waited in waits:
            bucket = BUCKETS[bucket_of(waited)]
            setattr(row, bucket, getattr(row, bucket) + 1)
        rows.append(row)
    return rows


def past(project: Project, now: dt.datetime) -> None:
    """A month of two queues: busy afternoons, quiet nights, high priorities that hardly wait, a day off."""
    rnd = random.Random(7)
    hours: list[QueueHour] = []
    slots: list[QueueSlot] = []
    for name, busy in (("default", 1.0), ("night", 0.4)):
        queue = services.ensure_queue(project, name)
        for back in range(1, 30 * 24):
            at = hour_of(now) - dt.timedelta(hours=back)
            if 200 < back < 222:
                continue
            day = math.sin((at.hour - 6) / 24 * 2 * math.pi) * (0.3 if at.weekday() > 4 else 1)
            hours += _bands(QueueHour, rnd, busy * (0.15 + max(0.0, day)), 4, queue=queue, hour=at)
        for back in range(1, 13):
            slots += _bands(QueueSlot, rnd, busy, 0.6, queue=queue, at=slot_of(now) - back * SLOT)
    QueueHour.objects.bulk_create(hours)
    QueueSlot.objects.bulk_create(slots)
    _used(project, now)


def _used(project: Project, now: dt.datetime) -> None:
    """A quarter of usage: a few members who use much, one who lets GPUs idle, and weekends."""
    rnd, hour_ms, rows = random.Random(3), 3_600_000, []
    queues_of = [services.ensure_queue(project, name) for name in ("default", "night")]
    for back in range(1, 90):
        day = now.date() - dt.timedelta(days=back)
        for number, user in enumerate(User.objects.filter(memberships__project=project).order_by("pk")):
            if rnd.random() < 0.2 + 0.5 * (day.weekday() > 4):
                continue
            gpu_ms = int(rnd.expovariate(1 / (40 / (number + 1))) * hour_ms)
            measured_ms = gpu_ms if number else gpu_ms // 2
            idle = min(1, rnd.random() * 0.3 * number)
            row = UsageDay(
                project=project, user=user, queue=queues_of[rnd.random() < 0.3], day=day, gpu_ms=gpu_ms,
                cpu_ms=8 * gpu_ms, measured_ms=measured_ms, idle_ms=int(measured_ms * idle),
                micro_usd=int(gpu_ms * 1.2) * (back % 3 == 0), done=rnd.randrange(9), failed=rnd.randrange(3),
            )  # fmt: skip
            rows.append(row)
    UsageDay.objects.bulk_create(rows)
