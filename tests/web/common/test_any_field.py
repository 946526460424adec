"""Whatever the fields of a page's address or form hold, also what no page sends, the page answers."""

from __future__ import annotations

import re

import pytest
from django.test import Client
from django.urls import get_resolver

from dstackweb.accounts.models import User
from dstackweb.backends.models import Gpu
from tests.browser import cloud_demo, demo
from tests.support import REPO
from tests.test_every_address import NOT_ASKED, pages
from tests.web.conftest import HTMX

pytestmark = [
    pytest.mark.nightly, pytest.mark.django_db(transaction=True), pytest.mark.both_sides,
    pytest.mark.postgres,  # which refuses more values than SQLite
]  # fmt: skip
READ = re.compile(r"""\b(?:GET|POST|query|form)(?:\.get|\.getlist)?[(\[]\s*"(\w+)\"""")
DECLARED = re.compile(r"^    (\w+) = forms\.|^    (\w+) = _", re.MULTILINE)
ODD = ("-1", "9" * 30, "nan", "\0", "x" * 5000)
ENDS = ("logout/", "gone/", "leave/", "revoke/", "delete/", "remove/", "others/end/", "stop/")
"""Addresses whose POST takes away what the others show."""


def fields() -> set[str]:
    """The names of fields that pages read."""
    found = set()
    for file in (REPO / "dstackweb" / "web").rglob("*.py"):
        text = file.read_text()
        found |= set(READ.findall(text))
        found |= {one or other for one, other in DECLARED.findall(text)}
    return found


def test_any_value_of_every_field_of_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    project, _mia = demo.build()
    cloud_demo.build(project, monkeypatch)
    known = {
        "project": "main", "queue": "default", "run": "train-llama-sft", "host": "gpu-box-1", "name": "none",
        "sweep": "none", "handle": "none", "form": "csv", "uuid": Gpu.objects.filter(host__name="gpu-box-1")[0].uuid,
    }  # fmt: skip
    client = Client(raise_request_exception=False)
    client.force_login(User.objects.get(username="root"))
    named, failed = fields(), []
    assert {"q", "priority", "config", "max_gpus", "role"} <= named
    for template in pages(get_resolver().url_patterns):
        if "<" in template or template in NOT_ASKED or template.startswith(("/api/", "/metrics")):
            continue
        address = template.format_map(known)
        for value in ODD:
            values = dict.fromkeys(named, value)
            asked = [client.get(address, values), client.get(address, values, headers=HTMX)]
            if not template.endswith(ENDS):
                asked.append(client.post(address, values, headers=HTMX))
            failed += [(address, value, one.status_code) for one in asked if one.status_code >= 500]
    assert failed == []
