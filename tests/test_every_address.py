"""Every page, and all that the API reads, answers, on both databases: what they ask of SQL is written for both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.conf import settings
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, resolve

from dstackweb.accounts.models import User
from dstackweb.accounts.services import create_token
from dstackweb.backends.models import Gpu
from tests.browser import (
    cloud_demo,
    demo,
    test_every_page as test_every_page_is_fit,
    test_gpus,
    test_offers,
    test_progress,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.both_sides]
NOT_ASKED = {
    "/logout/", "/login/{token}/", "/invite/{token}/", "/password/{uidb64}/{token}/",
    # Of what this deployment, or this user, has not set up.
    "/login/sso/callback/", "/password/forgot/", "/account/two-step/codes/", "/account/two-step/app/remove/",
}  # fmt: skip


def query(address: str) -> str:
    """What pages about one prefix of tasks or of runs, comparisons and artifacts want to know."""
    found = "prefix=train-baseline&group=train-baseline-1" if "/runs/" in address else "prefix=sweep-lr"
    return f"?{found}&with=export-onnx&path=metrics.csv"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands in addresses, in a deployment that has something of everything."""
    project, mia = demo.build()
    demo.sweep(project, mia)
    cloud_demo.build(project, monkeypatch)
    return {
        "project": "main", "queue": "default", "run": "train-llama-sft", "host": "gpu-box-1", "name": "none",
        "sweep": "lr-grid", "handle": "none", "form": "csv", "uuid": Gpu.objects.filter(host__name="gpu-box-1")[0].uuid,
    }  # fmt: skip


@pytest.fixture
def client(names: dict[str, str]) -> Client:
    """Signed in as somebody who may see all of it."""
    client = Client()
    client.force_login(User.objects.get(username="root"))
    return client


def pages(patterns: list[URLPattern | URLResolver], before: str = "") -> Iterator[str]:
    """Templates of the addresses below these patterns, such as `/p/{project}/queue/`."""
    for one in patterns:
        route = before + str(one.pattern)
        if isinstance(one, URLResolver):
            if route not in ("admin/", "api/v1/"):
                yield from pages(one.url_patterns, route)
        else:
            yield "/" + route.replace("<str:", "{").replace("<path:", "{").replace(">", "}")


def swept_views() -> set[str]:
    """The names of the pages whose accessibility is checked by `check_pages`."""
    below = [f"/p/main/{path}" for path in (*test_progress.PAGES.values(), *test_gpus.PAGES.values())]
    paths = [*test_every_page_is_fit.PAGES.values(), *test_offers.PAGES.values(), *below, "/login/"]
    return {resolve(path.partition("?")[0]).view_name for path in paths}


def test_every_page(client: Client, names: dict[str, str]) -> None:
    answers: dict[str, set[int]] = {}
    views: set[str] = set()
    headers = {"Authorization": f"Bearer {settings.DSTACKWEB_METRICS_TOKEN}"}  # of /metrics; pages don't read it
    for template in pages(get_resolver().url_patterns):
        if "<" not in template and template not in NOT_ASKED and not template.startswith("/api/"):
            address = template.format_map(names)
            answer = client.get(address + query(address), headers=headers)
            answers.setdefault(template, set()).add(answer.status_code)
            if answer.status_code == 200 and not answer.streaming and b"</html>" in answer.content:
                views.add(resolve(address).view_name)
    assert {template: codes for template, codes in answers.items() if not codes <= {200, 302, 405}} == {}
    assert sum(codes == {200} for codes in answers.values()) > 35
    assert views - swept_views() == set(), "add it to the pages of tests/browser, which axe-core checks"


def test_everything_that_the_api_reads(client: Client, names: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {create_token(User.objects.get(username='root'), 'test')[1]}"}
    answers = {}
    for template, methods in client.get("/api/v1/openapi.json").json()["paths"].items():
        if "get" in methods:
            by_name = {"queues": names["queue"], "backends": "aws", "sweeps": names["sweep"]}
            name = next((name for part, name in by_name.items() if f"/{part}/" in template), names["run"])
            address = template.format(project=names["project"], name=name)
            answers[address] = client.get(address + query(address), headers=headers).status_code
    assert {address: code for address, code in answers.items() if code != 200} == {}
    assert len(answers) > 25
