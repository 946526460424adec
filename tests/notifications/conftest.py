from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from ipaddress import ip_network

import pytest
from pytest_django import Settings

from dstackweb.accounts.models import Project, User
from dstackweb.notifications import channels
from dstackweb.notifications.models import Channel, ChannelKind
from dstackweb.runs.models import Run
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import move_run
from tests.factories import join, make_project, make_run, make_user
from tests.notifications.receiver import Receiver

NOW = dt.datetime(2031, 5, 4, 9, 30, tzinfo=dt.UTC)
MakeChannel = Callable[[ChannelKind], Channel]


@pytest.fixture
def project() -> Project:
    return make_project("main")


@pytest.fixture
def ann(project: Project) -> User:
    return join(project, make_user("ann", email="ann@example.org"))


@pytest.fixture
def run(project: Project, ann: User) -> Run:
    return make_run(project, ann, "train")


@pytest.fixture
def receiver(settings: Settings) -> Iterator[Receiver]:
    settings.DSTACKWEB_WEBHOOK_NETWORKS = [ip_network("127.0.0.0/8")]
    settings.DSTACKWEB_PUBLIC_URL = "https://gpus.example.org"
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def channel_to(ann: User, receiver: Receiver) -> MakeChannel:
    """A channel of ann to the receiver, with the first rules."""

    def make(kind: ChannelKind) -> Channel:
        channel = channels.create(ann, kind, kind.value, receiver.url)
        return channel

    return make


@pytest.fixture
def fail(project: Project, ann: User) -> Callable[..., None]:
    """Runs of these names fail."""

    def failed(*names: str) -> None:
        for name in names:
            run = make_run(project, ann, name)
            assert move_run(run, RunStatus.FAILED, now=NOW, status_message="it broke")

    return failed
