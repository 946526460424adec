"""A machine that cannot be a host gets one clear line before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from dstackweb.backends.hosts import joining
from dstackweb.scheduler.management.commands import host as host_command
from dstackweb.scheduler.management.commands.host import NotReady
from tests.support import free_port

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def ready(settings: Any, live_server: Any) -> Iterator[Any]:
    """Settings of a machine that lacks nothing; a test takes something away."""
    settings.DATABASE_URL = settings.DATABASE_URL or "sqlite:////somewhere"
    settings.DSTACKWEB_API_URL = live_server.url
    return settings


def test_a_machine_that_lacks_nothing_may_start(ready: Any) -> None:
    host_command.check_ready("far")
    assert host_command.api_error("far") == ""


def test_no_database_is_one_line(ready: Any) -> None:
    ready.DATABASE_URL = ""
    with pytest.raises(NotReady, match=r"DATABASE_URL is not set.*dstackweb host join"):
        host_command.check_ready("far")


def test_a_database_of_another_version_is_one_line(ready: Any) -> None:
    recorder, [last] = MigrationRecorder(connection), MigrationLoader(connection).graph.leaf_nodes("backends")
    recorder.record_unapplied(*last)
    try:
        with pytest.raises(NotReady, match=rf"lacks migration backends\.{last[1]}"):
            host_command.check_ready("far")
    finally:
        recorder.record_applied(*last)


def test_a_broker_that_is_away_is_one_line(ready: Any) -> None:
    ready.Q_CLUSTER = {**ready.Q_CLUSTER, "redis": f"redis://127.0.0.1:{free_port()}/0"}
    with pytest.raises(NotReady, match="cannot use Redis at REDIS_URL"):
        host_command.check_ready("far")


def test_another_key_than_the_servers_is_one_line(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_command, "host_token", lambda name: joining.host_token(name) + "x")
    with pytest.raises(NotReady, match="a different DSTACKWEB_SECRET_KEY"):
        host_command.check_ready("far")


def test_plain_http_across_a_network_is_one_line(ready: Any) -> None:
    ready.DSTACKWEB_API_URL = "http://10.0.0.1:8000"
    with pytest.raises(NotReady, match="is not encrypted"):
        host_command.check_ready("far")


def test_a_host_starts_without_the_api_and_shows_the_error(ready: Any) -> None:
    ready.DSTACKWEB_API_URL = f"http://127.0.0.1:{free_port()}"
    host_command.check_ready("far")
    assert "cannot reach the API at" in host_command.api_error("far")


def test_one_home_is_one_hosts(tmp_path: Path) -> None:
    with closing(host_command.lock_home(tmp_path)), pytest.raises(NotReady, match="another host uses"):
        host_command.lock_home(tmp_path)
    host_command.lock_home(tmp_path).close()
