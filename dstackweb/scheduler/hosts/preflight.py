"""What a machine needs to be a host, looked at before it becomes one: each thing that is missing is one clear line."""

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
from dstackweb.lib.addresses import is_exposed

LOCK = "host.lock"
HELLO_S = 5.0


class NotReady(Exception):
    """Why this machine can't be a host yet, and what to do, in one line."""


def hold_home(home: Path) -> IO[str]:
    """Take the home for this host; the returned file holds it until it is closed. Raises NotReady."""
    lock = open(home / LOCK, "a")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise NotReady(f"a host runs already with the data in {home}: for a second one set DSTACKWEB_HOME") from None
    return lock


class Away(NotReady):
    """The API doesn't answer now; it may later."""


def check(name: str) -> None:
    """Raise NotReady unless this machine can be the host `name`. An API that is away is no hindrance: it comes back."""
    _check_database()
    _check_redis()
    with contextlib.suppress(Away):
        _say_hello(name)


def api_trouble(name: str) -> str:
    """What keeps runners here from using the API, in one line; empty where nothing does."""
    try:
        _say_hello(name)
    except NotReady as trouble:
        return str(trouble)
    return ""


def _check_database() -> None:
    where = "DATABASE_URL"
    if not settings.DATABASE_URL:
        raise NotReady(
            f"{where} is missing: a host works on the deployment's own PostgreSQL. "
            "`dstackweb host join`, with the command that the hosts page prints, gets it and all else"
        )
    try:
        connection.ensure_connection()
        behind = MigrationExecutor(connection).migration_plan(MigrationExecutor(connection).loader.graph.leaf_nodes())
    except DatabaseError as error:
        first = str(error).strip().splitlines()[0]
        raise NotReady(f"the database of {where} can't be used: {first}") from error
    if behind:
        raise NotReady(
            f"the database of {where} is not this version's: it lacks {behind[0][0]}. "
            "Start the server with this version first, and see that it uses the same database"
        )


def _check_redis() -> None:
    if "redis" not in settings.Q_CLUSTER:
        return
    try:
        redis.from_url(settings.Q_CLUSTER["redis"]).ping()
    except redis.RedisError as error:
        raise NotReady(f"the Redis of REDIS_URL can't be used: {error}") from error


def _say_hello(name: str) -> None:
    url = settings.DSTACKWEB_API_URL
    if is_exposed(url) and not settings.DSTACKWEB_INSECURE_HTTP:
        raise NotReady(
            f"{url} is not encrypted, and runners send no token there: set DSTACKWEB_PUBLIC_URL to the server's "
            "https:// address, or DSTACKWEB_INSECURE_HTTP=1 on a network that you trust"
        )
    token = host_token(name)
    try:
        answer = httpx.get(f"{url}/api/v1/hosts/hello", headers={"Authorization": f"Bearer {token}"}, timeout=HELLO_S)
        told = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        why = str(error) or type(error).__name__
        raise Away(
            f"the API at {url}, which jobs need, can't be used: {why}; is DSTACKWEB_PUBLIC_URL right?"
        ) from error
    if answer.status_code == 403:
        raise NotReady(f"the server at {url} has another DSTACKWEB_SECRET_KEY than this machine; they must be the same")
    if not answer.is_success or not isinstance(told, dict) or told.get("host") != name:
        raise Away(f"{url} doesn't answer as dstackweb does; is DSTACKWEB_PUBLIC_URL right?")
