"""Whether the database and Redis are protected from jobs, which reach the same addresses as the server.

Who can write to Redis can have tasks run twice or never, and who can write to the database can do anything. So a server
without a real password there does not start. Rules by user keep jobs from guessing passwords, and from faults in what
comes before these; and from listening on such a port while it is free: who connects there would send passwords,
sessions and tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import psutil

from dstackweb.backends.models import Ports
from dstackweb.runner.isolation import uids_of
from dstackweb.runner.state import say

DEFAULTS = frozenset({"postgres", "postgresql", "dstackweb", "redis", "password", "secret", "changeme", "admin"})
CONNECT_S, TIMEOUT_S = 5, 10.0
POSTGRES, REDIS = 5432, 6379
TABLES = Path("/run/dstackweb-tables")
"""A file for each table of rules, with its home. The machine forgets both when it restarts."""
BRIDGES = ("docker*", "br-*", "podman*", "cni*")
"""Networks of containers on this machine. A published port leads there without showing in these rules, which come
before; a container's own address does not, nor is it this machine's."""


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
    import psycopg

    try:
        psycopg.connect(
            host=host, port=database.get("PORT") or POSTGRES, user=user, dbname=database["NAME"],
            password=secrets.token_hex(8), passfile=os.devnull, connect_timeout=CONNECT_S,
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
        with redis.from_url(_without_credentials(url), socket_timeout=CONNECT_S) as bare:
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


def close_ports(home: Path, job_user: str, database: dict[str, Any], redis_url: str, *own_ports: int) -> Ports:
    """Refuse connections of all projects' users to both, with nftables, and connections to these users on the ports of
    both and on `own_ports`, the server's. Returns what holds for database and Redis.

    The rules of a home are one table. They stay when its server stops while jobs run, as these do (`reopen_ports`), and
    go at another server's start where the home is gone.
    """
    services = list(filter(None, [_postgres(database), _redis(redis_url)]))
    uids = uids_of(job_user)
    if os.getuid() != 0 or uids is None or shutil.which("nft") is None:
        return Ports.OPEN if services else Ports.NONE
    ports = sorted({*filter(None, own_ports), *(port for _host, port in services)})
    found = [f"fib saddr type local tcp sport {port} drop" for port in ports]
    found += [rule for service in services for rule in _rules(*service)]
    inside = ", ".join(map(str, sorted({POSTGRES, REDIS, *(port for _host, port in services)})))
    found += [f'oifname "{bridge}" tcp dport {{ {inside} }} reject with tcp reset' for bridge in BRIDGES if services]
    rules = [f"meta skuid {uids[0]}-{uids[1]} {rule}" for rule in found]
    chain = "\n".join(["type filter hook output priority raw; policy accept;", *rules])
    table = table_of(home)
    try:
        TABLES.mkdir(mode=0o700, exist_ok=True)
        for other in TABLES.iterdir():
            try:
                os.stat(other.read_bytes())
            except FileNotFoundError:  # another error does not say that it is gone
                if _nft(_without(other.name)):
                    other.unlink(missing_ok=True)
        (TABLES / table).write_bytes(os.fsencode(home.resolve()))
    except OSError as error:
        say(f"rules of homes that are gone can't be removed: {error}")
    made = _nft(f"{_without(table)}table inet {table} {{\nchain output {{\n{chain}\n}}\n}}\n")
    if not services:
        return Ports.NONE
    return Ports.CLOSED if made else Ports.OPEN


def reopen_ports(home: Path) -> None:
    """Remove the rules of a home, once no job of it runs."""
    if os.getuid() == 0 and shutil.which("nft") is not None and _nft(_without(table_of(home))):
        (TABLES / table_of(home)).unlink(missing_ok=True)


def table_of(home: Path) -> str:
    return f"dstackweb_{hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:8]}"


def _without(table: str) -> str:
    """Make the table first, so that it can be deleted if it was not there."""
    return f"table inet {table}\ndelete table inet {table}\n"


def end_jobs_on(port: int, job_user: str) -> bool:
    """Kill processes of projects' users that listen on a port, which a job can take while the server is not running;
    whether there were any."""
    uids = uids_of(job_user)
    if os.getuid() != 0 or uids is None:
        return False
    ended = False
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port and found.pid is not None:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(found.pid)
                if uids[0] <= process.uids().real <= uids[1]:
                    say(f"process {found.pid} of a job listens on the server's port {port}: it is ended")
                    process.kill()
                    process.wait(TIMEOUT_S)
                    ended = True
    return ended


def _postgres(database: dict[str, Any]) -> tuple[str, int] | None:
    host = str(database.get("HOST") or "")
    if not database["ENGINE"].endswith("postgresql") or not host or host.startswith("/"):
        return None
    return host, int(database.get("PORT") or POSTGRES)


def _redis(url: str) -> tuple[str, int] | None:
    parts = urlsplit(url)
    return (parts.hostname or "localhost", parts.port or REDIS) if parts.scheme in ("redis", "rediss") else None


def _rules(host: str, port: int) -> list[str]:
    """For all addresses of this machine, since a server may listen on several, and for those that the name has now."""
    try:
        found = {(family, address[0]) for family, *_rest, address in socket.getaddrinfo(host, port)}
    except OSError:
        found = set()
    of_name = [
        f"{'ip6' if family == socket.AF_INET6 else 'ip'} daddr {address} tcp dport {port} reject with tcp reset"
        for family, address in sorted(found)
    ]
    return [f"fib daddr type local tcp dport {port} reject with tcp reset", *of_name]


def _nft(script: str) -> bool:
    try:
        done = subprocess.run(
            ["nft", "-f", "-"], input=script, text=True, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        say(f"nft can't be run: {error}")
        return False
    if done.returncode:
        say(f"nft failed: {done.stderr.strip()[-300:]}")
    return done.returncode == 0
