"""A project with a member and a manager, and browsers that are signed in as them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from tests.factories import join, make_project, make_user

VERBATIM = re.compile(r"(<(?:pre|textarea|script)\b.*?</(?:pre|textarea|script)>)", re.DOTALL)
INLINE = "a|abbr|b|code|em|i|kbd|small|span|strong|time"
NO_SPACE = re.compile(
    rf"(?<=/>)\n|(?<!\w)(<(?!/)[^<>]*>)\n|\n(?=</)|\n(?=<(?!/?(?:{INLINE})\b))|(</(?!(?:{INLINE})\b)[^<>]*>)\n"
)


def without_layout(html: str) -> str:
    """The page without the line breaks and the indentation of its templates, where a browser shows no space either."""
    parts = VERBATIM.split(html)
    for at in range(0, len(parts), 2):
        lines = re.sub(r"\s*\n\s*", "\n", parts[at])
        parts[at] = NO_SPACE.sub(r"\1\2", lines).replace("\n", " ")
    return "".join(parts)


class PageClient(Client):
    """A browser that gets pages without their templates' layout."""

    def request(self, **request: Any) -> Any:
        answer = super().request(**request)
        if (
            not answer.streaming
            and answer.headers.get("Content-Type", "").startswith("text/html")
            and not answer.headers.get("Content-Encoding")
        ):
            answer.content = without_layout(answer.content.decode()).encode()
        return answer


@pytest.fixture
def project(db: None) -> Project:
    return make_project("main")


@pytest.fixture
def ann(project: Project) -> User:
    return join(project, make_user("ann"), "member")


@pytest.fixture
def mia(project: Project) -> User:
    return join(project, make_user("mia"), "manager")


@pytest.fixture
def as_user() -> Callable[[User], Client]:
    def sign_in(user: User) -> Client:
        client = PageClient()
        client.force_login(user)
        return client

    return sign_in


HTMX = {"HX-Request": "true"}
