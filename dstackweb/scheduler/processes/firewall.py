"""Jobs of projects' users can't connect to the server's database and Redis from its own machine, nor answer in place of
these or of the server while it is not running: rules by user.

Passwords protect database and Redis (`protection.py`). This keeps jobs from guessing them, and from faults in what
comes before. Any user may listen on a port that is free: who connects there would send passwords, sessions and tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
from typing import Any
from urllib.parse import urlsplit

import psutil

from dstackweb.backends.models import Ports
from dstackweb.runner.isolation import uids_of
from dstackweb.runner.state import say

TIMEOUT_S = 10.0
POSTGRES, REDIS = 5432, 6379
BRIDGES = ("docker*", "br-*", "podman*", "cni*")
"""Networks of containers on this machine. A published port leads there without showing in these rules, which come
before; a container's own address does not, nor is it this machine's."""


def close_ports(job_user: str, database: dict[str, Any], redis_url: str, *own_ports: int) -> Ports:
    """Refuse connections of all projects' users to both, with nftables, and connections to these users on the ports of
    both and on `own_ports`, the server's. Returns what holds for database and Redis.

    The rules stay when the server stops, as its jobs do. Servers with the same database, Redis and port share them.
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
    table = f"table inet dstackweb_{hashlib.sha256(chain.encode()).hexdigest()[:8]}"
    # Made first, so that it can be deleted if it was not there.
    script = f"{table}\ndelete {table}\n{table} {{\nchain output {{\n{chain}\n}}\n}}\n"
    made = _nft(script)
    if not services:
        return Ports.NONE
    return Ports.CLOSED if made else Ports.OPEN


def end_jobs_on(port: int, job_user: str) -> bool:
    """Kill the processes of projects' users that listen on a port of this machine, and whether there were any.

    While the server is not running a job can take its port, and would keep it from starting again.
    """
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
