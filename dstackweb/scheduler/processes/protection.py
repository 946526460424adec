"""Whether the database and Redis are protected from jobs, which reach the same addresses as the server.

Who can write to Redis can have tasks run twice or never, and who can write to the database can do anything. So a server
without a real password there does not start.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import psycopg

DEFAULTS = frozenset({"postgres", "postgresql", "dstackweb", "redis", "password", "secret", "changeme", "admin"})
TIMEOUT_S = 5


def refusal(database: dict[str, Any], redis_url: str) -> str | None:
    """What is unprotected, and how to fix it. `database` is of Django's DATABASES; both are reachable."""
    if database["ENGINE"].endswith("postgresql") and (found := _of_postgres(database)):
        return found
    return _of_redis(redis_url) if redis_url else None


def _of_postgres(database: dict[str, Any]) -> str | None:
    host, user, password = (str(database.get(name) or "") for name in ("HOST", "USER", "PASSWORD"))
    role = f"ALTER ROLE \"{user}\" PASSWORD '…'"
    if _is_default(password, user, str(database["NAME"])):
        return (
            f"the password of DATABASE_URL can be guessed, and jobs can reach the database. Set another with {role}, "
            "and put it into DATABASE_URL"
        )
    if not host or host.startswith("/"):  # a socket, where PostgreSQL knows the user of each process
        return None
    try:
        psycopg.connect(
            host=host, port=database.get("PORT") or 5432, user=user, dbname=database["NAME"],
            password=secrets.token_hex(8), passfile=os.devnull, connect_timeout=TIMEOUT_S,
        ).close()  # fmt: skip
    except psycopg.OperationalError:
        return None
    return (
        f"PostgreSQL at {host} takes any password of the user {user}, so jobs can change the database. Replace `trust` "
        f"in pg_hba.conf by `scram-sha-256`, set a password with {role}, and put it into DATABASE_URL"
    )


def _of_redis(url: str) -> str | None:
    parts = urlsplit(url)
    if _is_default(unquote(parts.password or ""), unquote(parts.username or "")):
        return (
            "the password of REDIS_URL can be guessed, and jobs can reach Redis. Set another as `requirepass` in "
            "redis.conf, and put it into REDIS_URL"
        )
    if parts.scheme == "unix" and not _others_may_write(Path(parts.path)):
        return None
    import redis

    try:
        with redis.from_url(_without_credentials(url), socket_timeout=TIMEOUT_S) as bare:
            bare.ping()
    except redis.RedisError:
        return None
    return (
        "Redis needs no password, so jobs can write to the task queue. Set one as `requirepass` in redis.conf, and put "
        "it into REDIS_URL, as in redis://:PASSWORD@host:6379/0"
    )


def _is_default(password: str, *names: str) -> bool:
    return bool(password) and password.lower() in DEFAULTS | {name.lower() for name in names if name}


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    secret = {"username", "password", "ssl_certfile", "ssl_keyfile", "ssl_password"}
    query = urlencode([pair for pair in parse_qsl(parts.query) if pair[0] not in secret])
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{address}?{query}" if query else address


def _others_may_write(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return True
