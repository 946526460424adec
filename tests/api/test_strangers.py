"""Whoever has no access to a project learns nothing of it: not even whether the rest of a request was right."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from dstackweb.accounts.models import Project
from dstackweb.api.app import api as description
from tests.api.conftest import Api

BODIES = (b"", b"{", b"[]", b"{}", b'{"config": 1}', b"\xff")


def operations() -> Iterator[tuple[str, str]]:
    """Method and address of everything in a project, with its other parameters filled in."""
    for path, methods in description.get_openapi_schema()["paths"].items():
        if "{project}" in path:
            for method in methods:
                yield method.upper(), re.sub(r"\{(?!project\})\w+\}", "anything", path)


@pytest.mark.nightly
def test_a_stranger_gets_404_whatever_the_request_is(stranger: Api, project: Project) -> None:
    asked = list(operations())
    assert len(asked) > 30
    for method, path in asked:
        for body in BODIES:
            for query in ("", "?limit=nonsense&offset=-1&days=0&prefix="):
                answers = [
                    stranger.client.generic(
                        method, path.format(project=name) + query, body, "application/json", headers=stranger.headers
                    )
                    for name in ("main", "nowhere")
                ]
                assert [answer.status_code for answer in answers] == [404, 404], (method, path, body, query)
                assert answers[0].content == answers[1].content.replace(b"nowhere", b"main")


@pytest.mark.parametrize("path", ["", "v2", "v1", "v1/", "v1/nothing", "nothing/at/all", "v1/projects/main/nothing"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_what_is_not_there_is_refused_in_the_apis_form(stranger: Api, method: str, path: str) -> None:
    answer = stranger.client.generic(method, f"/api/{path}")
    if answer.status_code == 301:
        answer = stranger.client.generic(method, answer["Location"])
    assert (answer.status_code, answer["Content-Type"]) == (404, "application/json")
    assert "does not exist" in answer.json()["detail"]
