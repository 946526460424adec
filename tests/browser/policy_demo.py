"""Runs that policies would have stopped, and a ledger of stops: what the page of utilization policies shows."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.gpus.models import PolicyStop
from tests.browser.demo import PASSWORD
from tests.factories import join, make_project, make_run, make_user
from tests.gpus.past import past_run


def build() -> Project:
    """Three runs with samples of two hours, and four stops of the last days."""
    now = timezone.now()
    project = make_project("main")
    mia = join(project, make_user("mia", password=PASSWORD), "manager")
    ann = join(project, make_user("ann"))
    past_run(project, ann, "notebook-left-open", [[0] * 720, [3] * 720])
    past_run(project, mia, "train-llama-sft", [[95] * 720] * 2)
    past_run(project, ann, "evaluate-checkpoint-of-the-long-named-experiment", [[80] * 100 + [0] * 400])
    following = make_run(project, ann, "pretrain-ablation")
    stop = {"project": project, "user": ann, "min_gpu_utilization": 10, "time_window_s": 1800, "scope": "any"}
    for name, hours, more in (
        ("debug-shell", 30, {"until": now - dt.timedelta(hours=8), "price": Decimal("12.24"), "gpu_index": 1}),
        ("sweep-lr-003", 5, {"until": now + dt.timedelta(hours=2), "next_run": following, "next_at": now}),
        ("no-limit", 3, {"gpu_index": 0}),
        ("looked-at", 60, {"observed": True, "scope": "all"}),
    ):
        at = now - dt.timedelta(hours=hours)
        low = {"at": at, "low_since": at - dt.timedelta(minutes=30), "gpus": ["GPU-a", "GPU-b"]}
        PolicyStop.objects.create(run_name=name, **{**stop, **low, **more})
    return project
