"""Whatever text is in the database, wherever it came from: on every page it is text, and all of it can be seen."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.apps import apps
from django.db import models
from django.db.models import F, Value
from django.db.models.functions import Concat
from django.test import Client
from django.urls import get_resolver

from dstackweb.accounts.models import User
from dstackweb.backends.models import Gpu
from dstackweb.lib.text import CONTROLS, FORMATS, MARKS
from tests.browser import cloud_demo, demo
from tests.test_every_address import NOT_ASKED, pages

pytestmark = [pytest.mark.nightly, pytest.mark.django_db(transaction=True)]

MARKER = "evil-7d1"
HOSTILE = (
    f"</td></pre><script>{MARKER}</script><img src=x onerror={MARKER}>\"'{{{{7*7}}}}{{% now %}}"
    "\x1b]0;title\x07\x1b]52;c;aGk=\x07\x1b]8;;http://evil\x1b\\\x1b[31m\x1b[2J\x9b1A\x08"
    "\u202eright\u2066\u2028\u200b\ufeff" + "e" + "\u0301" * 60
)
HIDDEN = re.compile(f"[{CONTROLS}{FORMATS}]|[{MARKS}]{{5}}".replace("\\r", ""))
TEXTS = {
    "accounts.User": ["username", "first_name", "last_name", "email"],
    "accounts.Project": ["name"],
    "accounts.ApiToken": ["name"],
    "accounts.ProjectSecret": ["name"],
    "accounts.SavedView": ["name"],
    "profiles.Profile": ["name", "description"],
    "progress.Reporter": ["name"],
    "progress.TaskPrefix": ["name"],
    "progress.TaskGroup": ["name"],
    "progress.Task": ["key", "message"],
    "progress.TaskFailure": ["key", "group", "message"],
    "backends.Backend": ["name"],
    "backends.Host": ["name", "address", "agent_version", "job_user", "runs_dir", "error", "start_error"],
    "backends.Gpu": ["name"],
    "backends.HostInvite": ["host_name"],
    "backends.Instance": ["region", "zone", "instance_type", "gpu_name", "cloud_id", "address", "error"],
    "runs.Queue": ["name"],
    "runs.Run": ["name", "status_message", "config_text"],
    "runs.Job": ["region", "instance_type", "message"],
    "gpus.GpuSeries": ["name"],
    "gpus.HostSampling": ["error"],
    "gpus.PolicyExemption": ["reason"],
    "gpus.PolicyStop": ["run_name"],
    "audit.AuditEntry": ["actor_name", "name", "project_name"],
    "scheduler.PeriodicJob": ["last_error"],
}
KEPT = {"root", "main", "train-llama-sft", "gpu-box-1", "default", "sweep-lr", "train-baseline", "train-baseline-1"}
"""What the addresses of the pages name."""
ADDRESSED = {"accounts.Project", "runs.Queue", "runs.Run", "backends.Host", "backends.Backend"}
"""Their names are parts of addresses."""
INSIDE = {"name", "host", "run", "where", "user", "by", "text", "message", "error", "instance_type", "region", "reason"}
"""Texts inside of data."""
DATA = {
    "runs.RunEvent": "data", "runs.QueueEvent": "data", "backends.HostEvent": "data", "backends.Gpu": "stranger",
    "runs.Run": "status_detail", "runs.Job": "detail", "audit.AuditEntry": "changes", "backends.Host": "labels",
}  # fmt: skip


def spoil(data: Any, inside: bool) -> Any:
    if isinstance(data, dict):
        return {key: spoil(value, inside or key in INSIDE) for key, value in data.items()}
    if isinstance(data, list):
        return [spoil(value, inside) for value in data]
    return data + HOSTILE if inside and isinstance(data, str) else data


def spoil_all() -> None:
    """Put HOSTILE behind every text that people or programs chose."""
    for label, names in TEXTS.items():
        for name in names:
            rows: models.QuerySet[Any] = apps.get_model(label)._base_manager.exclude(**{f"{name}__in": KEPT})
            added = HOSTILE.replace("/", "") if label in ADDRESSED else HOSTILE
            rows.update(**{name: Concat(F(name), Value(added))})
    for label, name in DATA.items():
        rows, is_free = apps.get_model(label)._base_manager, label in ("audit.AuditEntry", "backends.Host")
        for pk, data in rows.values_list("pk", name):
            rows.filter(pk=pk).update(**{name: spoil(data, is_free)})


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    project, _mia = demo.build()
    cloud_demo.build(project, monkeypatch)
    spoil_all()
    client = Client()
    client.force_login(User.objects.get(username="root"))
    return client


def test_on_every_page_and_fragment_hostile_text_is_text(client: Client) -> None:
    names = {
        "project": "main", "queue": "default", "run": "train-llama-sft", "host": "gpu-box-1", "name": "none",
        "sweep": "none", "handle": "none", "form": "csv", "uuid": Gpu.objects.filter(host__name="gpu-box-1")[0].uuid,
    }  # fmt: skip
    bad, showed = [], 0
    admin = [f"/admin/{one.replace('.', '/').lower()}/" for one in TEXTS]
    templates = [one for one in pages(get_resolver().url_patterns) if not {"<"} & set(one) and one not in NOT_ASKED]
    for address in [one.format_map(names) for one in templates if not one.startswith("/api/")] + admin:
        for headers in ({}, {"HX-Request": "true"}):
            answer = client.get(f"{address}?prefix=sweep-lr", headers=headers)
            if not answer.get("Content-Type", "").startswith("text/html"):
                continue
            page = answer.content.decode()
            showed += MARKER in page
            if answer.status_code >= 500 or HIDDEN.search(page) or f"<script>{MARKER}" in page or "<img src=x" in page:
                found = HIDDEN.search(page)
                around = page[max(0, found.start() - 80) : found.start() + 20] if found else "markup"
                bad.append((answer.status_code, address, around))
    assert bad == []
    assert showed > 40
