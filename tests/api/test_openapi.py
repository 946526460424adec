"""The description of the API at /api/v1/openapi.json says what the API does."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.api import urls
from tests.api.conftest import Api
from tests.factories import make_run

pytestmark = pytest.mark.xdist_group("openapi")  # a process makes the description once
ANY_RUN = "/api/v1/projects/{project}/runs"


@pytest.fixture
def paths(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = api("GET", "openapi.json").json()["paths"]
    return found


def headers(operation: dict[str, Any]) -> set[str]:
    return {given["name"] for given in operation["parameters"] if given["in"] == "header"}


def test_headers_are_described_by_the_names_they_are_sent_with(paths: dict[str, Any]) -> None:
    assert headers(paths[f"{ANY_RUN}/{{name}}"]["patch"]) == {"If-Match"}
    assert headers(paths["/api/v1/projects/{project}/queues/{name}/move"]["post"]) == {"If-Match"}
    assert headers(paths[ANY_RUN]["post"]) == {"Idempotency-Key"}
    assert headers(paths["/api/v1/projects/{project}/holds"]["post"]) == {"Idempotency-Key"}


def test_binary_bodies_are_described_as_binary(paths: dict[str, Any]) -> None:
    answer = paths[f"{ANY_RUN}/{{name}}/logs"]["get"]["responses"]["200"]
    assert list(answer["content"]) == ["application/octet-stream"]
    assert {"X-Next-Offset", "X-Attempt", "X-Log-Complete"} <= set(answer["headers"])
    upload = paths["/api/v1/projects/{project}/archives/{sha256}"]["put"]
    assert list(upload["requestBody"]["content"]) == ["application/octet-stream"]


def test_the_answer_to_a_stale_write_is_described(
    api: Api, project: Project, member: User, paths: dict[str, Any]
) -> None:
    run = make_run(project, member, "hello")
    refused = api("PATCH", f"projects/main/runs/{run.name}", {"priority": 40}, If_Match='"older"')
    assert refused.status_code == 412
    schemas = api("GET", "openapi.json").json()["components"]["schemas"]
    assert set(refused.json()) <= set(schemas["StaleOut"]["properties"])
    for path, method in ((f"{ANY_RUN}/{{name}}", "patch"), ("/api/v1/projects/{project}/queues/{name}/move", "post")):
        answer = paths[path][method]["responses"]["412"]["content"]["application/json"]["schema"]
        assert answer == {"$ref": "#/components/schemas/StaleOut"}


def test_the_description_is_made_once_and_known_again_by_its_etag(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = client.get("/api/v1/openapi.json")
    assert (first.status_code, first["Content-Type"]) == (200, "application/json")
    monkeypatch.setattr(urls.api, "get_openapi_schema", lambda: pytest.fail("made again"))
    again = client.get("/api/v1/openapi.json", headers={"If-None-Match": first["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/api/v1/openapi.json").content == first.content
    assert client.post("/api/v1/openapi.json").json()["detail"] == "POST is not allowed here; allowed: GET, HEAD"
