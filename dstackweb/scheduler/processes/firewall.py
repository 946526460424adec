"""Jobs of projects' users can't connect to the server's database and Redis from its own machine: a rule by user.

Passwords protect both (`protection.py`). This keeps jobs from guessing them, and from faults in what comes before.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
from typing import Any
from urllib.parse import urlsplit

from dstackweb.backends.models import Ports
from dstackweb.runner.isolation import uids_of
from dstackweb.runner.state import say

TIMEOUT_S = 10.0


def close_ports(job_user: str, database: dict[str, Any], redis_url: str) -> Ports:
    """Refuse connections of all projects' users to both, with nftables.

    The rules stay when the server stops, as its jobs do. Servers with the same database and Redis share them.
    """
    services = list(filter(None, [_postgres(database), _redis(redis_url)]))
    if not services:
        return Ports.NONE
    uids = uids_of(job_user)
    if os.getuid() != 0 or uids is None or shutil.which("nft") is None:
        return Ports.OPEN
    rules = [f"meta skuid {uids[0]}-{uids[1]} {rule}" for service in services for rule in _rules(*service)]
    chain = "\n".join(["type filter hook output priority raw; policy accept;", *rules])
    table = f"table inet dstackweb_{hashlib.sha256(chain.encode()).hexdigest()[:8]}"
    # Made first, so that it can be deleted if it was not there.
    script = f"{table}\ndelete {table}\n{table} {{\nchain output {{\n{chain}\n}}\n}}\n"
    return Ports.CLOSED if _nft(script) else Ports.OPEN


def _postgres(database: dict[str, Any]) -> tuple[str, int] | None:
    host = str(database.get("HOST") or "")
    if not database["ENGINE"].endswith("postgresql") or not host or host.startswith("/"):
        return None
    return host, int(database.get("PORT") or 5432)


def _redis(url: str) -> tuple[str, int] | None:
    parts = urlsplit(url)
    return (parts.hostname or "localhost", parts.port or 6379) if parts.scheme in ("redis", "rediss") else None


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
