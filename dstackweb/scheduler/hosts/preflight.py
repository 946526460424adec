"""Checks before this machine starts as a host. Each failed check is one line that says what to do."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import IO

import httpx
import redis
from django.conf import settings
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor

from dstackweb.backends.hosts.joining import host_token
from dstackweb.lib.network import is_exposed

LOCK = "host.lock"
HELLO_S = 5.0


class NotReady(Exception):
    """Why this machine cannot be a host yet and what to do, in one line."""


def lock_home(home: Path) -> IO[str]:
    """Lock the home directory for this host until the returned file is closed. Raises NotReady."""
    lock = open(home / LOCK, "a")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise NotReady(f"another host uses {home}. Set DSTACKWEB_HOME to run a second one") from None
    return lock


class ApiUnreachable(NotReady):
    """The API does not answer now; it may later."""


def check(name: str) -> None:
    """Raise NotReady unless this machine can be the host `name`. An unreachable API is no obstacle: it comes back."""
    _check_database()
    _check_redis()
    with contextlib.suppress(ApiUnreachable):
        _check_api(name)


def api_error(name: str) -> str:
    """Why runners here cannot use the API, in one line; empty when they can."""
    try:
        _check_api(name)
    except NotReady as trouble:
        return str(trouble)
    return ""


def _check_database() -> None:
    where = "DATABASE_URL"
    if not settings.DATABASE_URL:
        raise NotReady(
            f"{where} is not set: a host needs the deployment's PostgreSQL. Run the `dstackweb host join` command from "
            "the hosts page, which sets it"
        )
    try:
        connection.ensure_connection()
        behind = MigrationExecutor(connection).migration_plan(MigrationExecutor(connection).loader.graph.leaf_nodes())
    except DatabaseError as error:
        first = str(error).strip().splitlines()[0]
        raise NotReady(f"cannot use the database in {where}: {first}") from error
    if behind:
        raise NotReady(
            f"the database in {where} lacks migration {behind[0][0]}. Upgrade and start the server first, and "
            "check that it uses the same database"
        )


def _check_redis() -> None:
    if "redis" not in settings.Q_CLUSTER:
        return
    try:
        redis.from_url(settings.Q_CLUSTER["redis"]).ping()
    except redis.RedisError as error:
        raise NotReady(f"cannot use Redis at REDIS_URL: {error}") from error


def _check_api(name: str) -> None:
    url = settings.DSTACKWEB_API_URL
    if is_exposed(url) and not settings.DSTACKWEB_INSECURE_HTTP:
        raise NotReady(
            f"{url} is not encrypted, so runners send no token there. Set DSTACKWEB_PUBLIC_URL to the server's "
            "https:// address, or DSTACKWEB_INSECURE_HTTP=1 on a trusted network"
        )
    token = host_token(name)
    try:
        answer = httpx.get(f"{url}/api/v1/hosts/hello", headers={"Authorization": f"Bearer {token}"}, timeout=HELLO_S)
        told = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        why = str(error) or type(error).__name__
        raise ApiUnreachable(
            f"cannot reach the API at {url}: {why}. Jobs need it; check DSTACKWEB_PUBLIC_URL"
        ) from error
    if answer.status_code == 403:
        raise NotReady(f"the server at {url} has a different DSTACKWEB_SECRET_KEY. Set the same key on this machine")
    if not answer.is_success or not isinstance(told, dict) or told.get("host") != name:
        raise ApiUnreachable(f"{url} is not a dstackweb server. Check DSTACKWEB_PUBLIC_URL")
