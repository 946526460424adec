"""A deleted backend is gone from wherever offers, quotas and figures are shown, at once; its machines are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends import services
from dstackweb.backends.models import Backend, Instance
from dstackweb.offers import counts, sources
from dstackweb.runs.models import Run
from dstackweb.runs.selectors import why
from tests.api.conftest import Api
from tests.factories import make_run, make_user, place_all, scraper
from tests.offers.cloud_stub import Cloud

pytestmark = pytest.mark.django_db(transaction=True)
SignIn = Callable[[User], Client]
NAME = "nimbus"
PAGES = ("offers/", "health/")


@pytest.mark.parametrize("with_past", [False, True], ids=["without a past", "with a past"])
def test_its_offers_and_figures_are_gone_everywhere_at_once(
    project: Project, ann: User, as_user: SignIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_past: bool
) -> None:
    Cloud(monkeypatch, tmp_path / "asked")
    monkeypatch.setattr(sources, "TICK_S", 60.0)
    backend = Backend.objects.create(name=NAME, kind="aws")
    if with_past:
        Instance.objects.create(backend=backend, project=project, region="eu", instance_type="g5", status="running")
    sources.refresh_due(timezone.now())
    api, root = Api(ann), Api(make_user("root", is_superuser=True))
    shown = [f"/p/main/{page}" for page in PAGES]

    def notices() -> list[str]:
        counts.flush()
        found = [as_user(ann).get(url).content.decode() for url in shown]
        found += [
            client("GET", path).content.decode() for client, path in ((api, "projects/main/offers"), (root, "backends"))
        ]
        return [*found, _metrics("dstackweb_offers"), _metrics("dstackweb_source")]

    api("GET", "projects/main/offers")
    assert all(NAME in text for text in notices())
    services.delete(NAME)
    assert not any(NAME in text for text in notices())
    for path in ("quotas", "cache"):
        assert api("GET", f"backends/{NAME}/{path}").status_code == 404
    assert (NAME in _metrics("dstackweb_instances")) == with_past
    run = make_run(project, ann, backends=[NAME])
    assert place_all() == 0
    assert why(Run.objects.select_related("queue").get(pk=run.pk))[0] == "backend_unavailable"


def _metrics(prefix: str) -> str:
    lines = scraper().get("/metrics").content.decode().splitlines()
    return "\n".join(line for line in lines if line.startswith(prefix))
