"""Making this machine a host: what is in the way is told first, then the keys are fetched, kept and used."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import httpx

import dstackweb
from dstackweb.cli import config
from dstackweb.cli.client import BASE, Api, reason
from dstackweb.cli.errors import CliError, UsageError
from dstackweb.cli.output import warn

ENV_FILE = "host.env"
KEPT = ("DSTACKWEB_JOB_USER", "DSTACKWEB_SHARED_UID")
"""Decisions about this machine, which the file keeps from the environment of the join."""
REACH_S = 5.0


@dataclass(frozen=True)
class Request:
    """How this machine wants to join."""

    url: str
    token: str = field(repr=False)
    name: str
    labels: dict[str, str]
    insecure: bool
    home: Path


def machine_name() -> str:
    """This machine's name, as far as a host can be called that."""
    return re.sub(r"[^\w.-]", "-", socket.gethostname()) or "localhost"


def default_home() -> Path:
    """Where a host keeps its files unless told otherwise."""
    if os.getuid() == 0:
        return Path("/var/lib/dstackweb-host")
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "dstackweb-host"


def join(request: Request) -> Path:
    """Use the token, and keep what came for it; returns the file. Raises CliError, before which nothing is used up."""
    if not config.is_token(request.token):
        raise UsageError("that is no join token; the hosts page makes one.")
    if config.is_exposed(request.url) and not request.insecure:
        raise UsageError(
            f"{request.url} is not encrypted; nothing was sent.",
            "The deployment's keys would cross the network in the open: use the server's https:// address,",
            "or --insecure on a network that you trust.",
        )
    _check_installed()
    home = _make_home(request.home)
    api = Api(config.Settings(request.url, request.token, config.DEFAULT_PROJECT, "--token"))
    body = {
        "name": request.name,
        "url": request.url,
        "version": dstackweb.__version__,
        "labels": request.labels,
        "insecure": request.insecure,
    }
    found = api.json(api.send("POST", f"{BASE}/hosts/join", json=body | {"check": True}, repeatable=True))
    if missing := [*found["obstacles"], *_out_of_reach(found)]:
        raise CliError(
            f"this machine can't join {request.url} yet; nothing was changed, and the token stays good.", *missing
        )
    joined = api.json(api.send("POST", f"{BASE}/hosts/join", json=body))
    if os.getuid() != 0 and not os.environ.get("DSTACKWEB_SHARED_UID"):
        warn("not started as root: the host refuses jobs unless DSTACKWEB_SHARED_UID=1 says that they may share a user")
    decided = {name: os.environ[name] for name in KEPT if os.environ.get(name)}
    return _store(home, joined["environment"] | decided)


def run(home: Path, *, labels: Mapping[str, str], address: str) -> NoReturn:
    """Become the host's process. Raises CliError when this machine has not joined, or lacks the server's parts."""
    _check_installed()
    env = {**os.environ, **_load(home), "DSTACKWEB_HOME": str(home.resolve())}
    env["DJANGO_SETTINGS_MODULE"] = "dstackweb.settings"
    package = Path(dstackweb.__file__).resolve().parents[1]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    argv = [sys.executable, "-m", "dstackweb.manage", "host"]
    argv += [f"--label={name}={value}" for name, value in labels.items()]
    argv += [f"--address={address}"] if address else []
    sys.stdout.flush()
    os.execve(sys.executable, argv, env)


def _check_installed() -> None:
    missing = [name for name in ("django", "django_q", "psycopg", "psutil") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this is the command line alone; a host needs the server's parts ({', '.join(missing)} is missing).",
            "Install them here, in the server's version: pip install 'dstackweb[server]'",
        )


def _out_of_reach(found: dict[str, Any]) -> Iterator[str]:
    """What this machine can't reach of what it needs, each in one line."""
    for there in found["reach"]:
        host, port = there["host"], there["port"]
        if not host:
            continue  # a socket of the server's own machine, which this one is
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
        except OSError as error:
            why = "no answer within 5 s" if isinstance(error, TimeoutError) else error.strerror or str(error)
            yield (
                f"can't reach the server's {there['what']} at {host}:{port}: {why}. "
                f"Open the port for this machine, or set {there['setting']} on the server to an address it reaches"
            )
    url = found["api_url"]
    try:
        answer = httpx.get(f"{url}/healthz", timeout=REACH_S)
        if not answer.is_success:
            yield f"{url}, where jobs look for the server, answers with HTTP {answer.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = "no answer within 5 s" if isinstance(error, httpx.TimeoutException) else reason(error)
        yield f"can't reach {url}, where jobs look for the server: {why}. Is DSTACKWEB_PUBLIC_URL right there?"


def _make_home(home: Path) -> Path:
    """The host's home; other users may pass through, since runs' directories lie in it."""
    try:
        home.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"can't make {home}: {error.strerror}; nothing was sent.", "Another place: --home DIR") from None
    if not os.access(home, os.W_OK | os.X_OK):
        raise CliError(f"can't write in {home}; nothing was sent.", "Another place: --home DIR")
    return home


def _store(home: Path, environment: Mapping[str, str]) -> Path:
    """Keep the environment for this user alone, the old file whole until the new one is there."""
    path = home / ENV_FILE
    fd, draft = tempfile.mkstemp(dir=home, prefix=f".{ENV_FILE}-")  # made with 0600
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write("# What this machine needs as a host: whoever reads it can do all that the server can.\n")
        file.writelines(f"{name}={shlex.quote(value)}\n" for name, value in sorted(environment.items()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    return path


def _load(home: Path) -> dict[str, str]:
    path = home / ENV_FILE
    try:
        lines = shlex.split(path.read_text("utf-8"), comments=True)
    except FileNotFoundError:
        raise UsageError(
            f"this machine has not joined: there is no {path}.",
            "A deployment admin gets the command for it on the hosts page.",
        ) from None
    except (OSError, ValueError) as error:
        raise CliError(f"can't read {path}: {error}") from None
    return dict(line.split("=", 1) for line in lines if "=" in line)
