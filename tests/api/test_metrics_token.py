"""/metrics answers only to a scraper with the deployment's token."""

from __future__ import annotations

import pytest
from django.conf import LazySettings
from django.test import Client

pytestmark = pytest.mark.django_db
TOKEN = "a-scrape-token-of-32-characters-x"


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer \u00e9"])
def test_a_stranger_is_refused_also_from_loopback(settings: LazySettings, given: str) -> None:
    settings.DSTACKWEB_METRICS_TOKEN = TOKEN
    answer = Client(REMOTE_ADDR="127.0.0.1").get("/metrics", headers={"Authorization": given})
    assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Bearer")
    assert b"dstackweb_" not in answer.content


def test_a_request_with_the_token_is_answered(settings: LazySettings) -> None:
    settings.DSTACKWEB_METRICS_TOKEN = TOKEN
    answer = Client().get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    assert b"dstackweb_runs" in answer.content


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer x"])
def test_without_a_configured_token_every_request_is_refused(settings: LazySettings, given: str) -> None:
    settings.DSTACKWEB_METRICS_TOKEN = ""
    answer = Client(REMOTE_ADDR="127.0.0.1").get("/metrics", headers={"Authorization": given})
    assert answer.status_code == 403
    assert "DSTACKWEB_METRICS_TOKEN" in answer.content.decode()
