"""Where the server keeps its data: its home with the secret key, the database, the caches and the task queue."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import dj_database_url

from dstackweb import env
from dstackweb.lib.process import write_once
from dstackweb.settings.environment import (
    DATABASE_URL,
    DSTACKWEB_CLUSTER_WORKERS,
    DSTACKWEB_HOME,
    DSTACKWEB_SECRET_KEY,
    REDIS_URL,
)


def _make_home(home: Path) -> None:
    try:
        home.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError
    except OSError:
        raise env.BadSetting("DSTACKWEB_HOME", str(home), "a directory that this program can write to") from None


def _secret_key(home: Path) -> str:
    """The key in `home`, made by the first process that needs it."""
    path = home / "secret_key"
    if not path.exists():
        write_once(path, secrets.token_urlsafe(48).encode())
    return path.read_text().strip()


# Both sides notice a lost network within 30 s: hosts reconnect, and the database server rolls back the transactions of
# a lost host, whose locks others may wait for.
_ALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
_SERVER_SIDE = {f"tcp_{name}": value for name, value in _ALIVE.items()} | {
    "tcp_user_timeout": 25_000,
    "idle_in_transaction_session_timeout": 10_000,
}
_CUT_OFF: dict[str, Any] = {
    "connect_timeout": 10,
    **_ALIVE,
    "tcp_user_timeout": 25_000,
    "options": " ".join(f"-c {name}={value}" for name, value in _SERVER_SIDE.items()),
}


def _patient(redis_url: str) -> str:
    """The URL with time-outs, unless it has its own: a lost connection must not block forever."""
    parts = urlsplit(redis_url)
    given = dict(parse_qsl(parts.query))
    waits = {"socket_timeout": "10"}
    if parts.scheme != "unix":
        waits |= {"socket_connect_timeout": "5", "socket_keepalive": "true"}
    return urlunsplit(parts._replace(query=urlencode(waits | given)))


def _database(home: Path) -> dict[str, Any]:
    if DATABASE_URL and not DATABASE_URL.startswith("sqlite"):
        database: dict[str, Any] = dict(dj_database_url.parse(DATABASE_URL, conn_max_age=60, conn_health_checks=True))
        if database["ENGINE"] == "django.db.backends.postgresql":
            database["ENGINE"] = "dstackweb.lib.postgresql"
        options: dict[str, Any] = database.pop("OPTIONS", None) or {}
        options = _CUT_OFF | options
        pooled = options.pop("pgbouncer", False)
        if not isinstance(pooled, bool):
            raise env.BadSetting("DATABASE_URL", DATABASE_URL, "pgbouncer=true for a PgBouncer, or nothing")
        if pooled:  # in transaction mode: no settings of a session, and nothing outlives a transaction
            options.pop("options")
        return database | {"OPTIONS": options, "DISABLE_SERVER_SIDE_CURSORS": pooled}
    if DATABASE_URL:
        database = dict(dj_database_url.parse(DATABASE_URL))
    else:
        path = home / "db.sqlite3"
        # Other users, such as those of jobs, must not read it. SQLite gives -wal and -shm the database's mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": path}
    return database | {
        "CONN_MAX_AGE": 60,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 30,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA cache_size=-16000",
        },
    }


def _cache(name: str, *, may_be_away: bool = True) -> dict[str, Any]:
    """Plain data as JSON: no pickle that a job could write is ever loaded.

    With `may_be_away` an unreachable Redis means cache misses; otherwise it raises an error.
    """
    if not REDIS_URL:
        return {"BACKEND": "dstackweb.lib.cache.RowCache", "KEY_PREFIX": name}
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": f"dstackweb:{name}",
        "OPTIONS": {
            "SERIALIZER": "django_redis.serializers.json.JSONSerializer",
            "SOCKET_CONNECT_TIMEOUT": 2,
            "SOCKET_TIMEOUT": 2,
            "IGNORE_EXCEPTIONS": may_be_away,
        },
    }


_make_home(DSTACKWEB_HOME)

SECRET_KEY = DSTACKWEB_SECRET_KEY or _secret_key(DSTACKWEB_HOME)
DATABASES = {"default": _database(DSTACKWEB_HOME)}
CACHES = {"default": _cache("default"), "offers": _cache("offers", may_be_away=False)}
DJANGO_REDIS_LOG_IGNORED_EXCEPTIONS = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Tasks are short and repeatable, and lost ones are found again from rows. So each is delivered once and not retried;
# `retry` only limits how long the task of a killed worker stays in the ORM broker.
Q_CLUSTER: dict[str, Any] = {
    "name": "dstackweb",
    "ALT_CLUSTERS": {},  # any Q_CLUSTER_NAME works, with the same values
    "workers": DSTACKWEB_CLUSTER_WORKERS,
    "bulk": 10,
    "queue_limit": 20,
    "timeout": 60,
    "retry": 90,
    "max_attempts": 2,
    "ack_failures": True,
    "save_limit": -1,
    "poll": 0.04,
    "recycle": 5000,
    "scheduler": False,
    "catch_up": False,
    "log_level": "WARNING",
    "label": "Task queue",
}
_BROKERS = "dstackweb.scheduler.processes.brokers"
if REDIS_URL:
    Q_CLUSTER |= {"redis": _patient(REDIS_URL), "broker_class": f"{_BROKERS}.RedisBroker"}
else:
    Q_CLUSTER |= {"orm": "default", "broker_class": f"{_BROKERS}.OrmBroker"}
