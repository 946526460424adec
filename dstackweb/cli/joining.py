"""Making this machine a host: check what it can reach, use the join token, save the keys, start the host."""

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
from dstackweb.cli.client import Api, reason
from dstackweb.cli.errors import CliError, UsageError
from dstackweb.cli.output import warn
from dstackweb.lib.network import is_exposed

ENV_FILE = "host.env"
OWN_SETTINGS = ("DSTACKWEB_JOB_USER", "DSTACKWEB_SHARED_UID")
"""Settings of this machine: the file takes them from the environment of `join`."""
REACH_S = 5.0


@dataclass(frozen=True)
class Request:
    """The options of `dstackweb host join`."""

    url: str
    token: str = field(repr=False)
    name: str
    labels: dict[str, str]
    insecure: bool
    home: Path


def machine_name() -> str:
    """This machine's name, with the characters that a host's name can't have replaced."""
    return re.sub(r"[^\w.-]", "-", socket.gethostname()) or "localhost"


def default_home() -> Path:
    """The default directory for a host's files."""
    if os.getuid() == 0:
        return Path("/var/lib/dstackweb-host")
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "dstackweb-host"


def join(request: Request) -> Path:
    """Use the token, and save the keys; returns the file. Raises CliError while the token is still valid."""
    if not config.is_token(request.token):
        raise UsageError("invalid join token. Make one on the Hosts page.")
    if is_exposed(request.url) and not request.insecure:
        raise UsageError(
            f"{request.url} is not encrypted. Nothing was sent.",
            "Use the server's https:// URL, or --insecure on a trusted network: the deployment's keys are sent.",
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
    found = api.json(api.send("POST", api.path("hosts", "join"), json=body | {"check": True}, repeatable=True))
    if missing := [*found["obstacles"], *_out_of_reach(found)]:
        raise CliError(f"this machine can't join {request.url} yet. The token is still valid.", *missing)
    joined = api.json(api.send("POST", api.path("hosts", "join"), json=body))
    if os.getuid() != 0 and not os.environ.get("DSTACKWEB_SHARED_UID"):
        warn("not running as root: the host refuses jobs unless DSTACKWEB_SHARED_UID=1 lets them share its user")
    own = {name: os.environ[name] for name in OWN_SETTINGS if os.environ.get(name)}
    return _store(home, joined["environment"] | own)


def run(home: Path, *, labels: Mapping[str, str], address: str) -> NoReturn:
    """Replace this process by the host. Raises CliError if this machine has not joined, or lacks server packages."""
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
            f"a host needs the server's packages, and these are missing: {', '.join(missing)}.",
            "Install them in the server's version: pip install 'dstackweb[server]'",
        )


def _out_of_reach(found: dict[str, Any]) -> Iterator[str]:
    """A line for each service that this machine needs and can't reach."""
    for service in found["reach"]:
        host, port = service["host"], service["port"]
        if not host:
            continue  # a Unix socket: this is the server's machine
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
        except OSError as error:
            why = "no answer within 5 s" if isinstance(error, TimeoutError) else error.strerror or str(error)
            yield (
                f"can't reach the server's {service['what']} at {host}:{port}: {why}. "
                f"Open the port, or set {service['setting']} on the server to an address that this machine reaches"
            )
    url = found["api_url"]
    try:
        answer = httpx.get(f"{url}/healthz", timeout=REACH_S)
        if not answer.is_success:
            yield f"{url}, the URL that jobs use, answers with HTTP {answer.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = "no answer within 5 s" if isinstance(error, httpx.TimeoutException) else reason(error)
        yield f"can't reach {url}, the URL that jobs use: {why}. Check DSTACKWEB_PUBLIC_URL on the server"


def _make_home(home: Path) -> Path:
    """Make the host's home, which other users can enter: the directories of runs are in it."""
    try:
        home.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        message = f"can't create {home}: {error.strerror}. Nothing was sent."
        raise CliError(message, "Use another directory: --home DIR") from None
    if not os.access(home, os.W_OK | os.X_OK):
        raise CliError(f"can't write to {home}. Nothing was sent.", "Use another directory: --home DIR")
    return home


def _store(home: Path, environment: Mapping[str, str]) -> Path:
    """Save the environment, readable by this user only, and replace the old file in one step."""
    path = home / ENV_FILE
    fd, draft = tempfile.mkstemp(dir=home, prefix=f".{ENV_FILE}-")  # made with 0600
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write("# The settings and keys of this host. They give full access to the deployment: keep them secret.\n")
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
            f"this machine has not joined: {path} does not exist.",
            "Deployment admins get the join command on the Hosts page.",
        ) from None
    except (OSError, ValueError) as error:
        raise CliError(f"can't read {path}: {error}") from None
    return dict(line.split("=", 1) for line in lines if "=" in line)
