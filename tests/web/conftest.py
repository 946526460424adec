"""A project with a member and a manager, and browsers that are signed in as them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from tests.factories import join, make_project, make_user


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
        client = Client()
        client.force_login(user)
        return client

    return sign_in


HTMX = {"HX-Request": "true"}
