"""Makes this machine a host: a join token becomes the host's own, and this process its agent."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import dstackweb
from dstackweb.cli import config
from dstackweb.cli.language import _
from dstackweb.cli.output import CliError, UsageError, warn
from dstackweb.lib.network import is_exposed
from dstackweb.runner.state import HOST_CONFIG


@dataclass(frozen=True)
class JoinOptions:
    """The options of `dstackweb host join`."""

    url: str
    token: str = field(repr=False)
    name: str
    labels: dict[str, str]
    insecure: bool
    home: Path


def default_home() -> Path:
    if os.getuid() == 0:
        return Path("/var/lib/dstackweb-host")
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "dstackweb-host"


def use_token(request: JoinOptions) -> Path:
    """Exchange the token for the host's own, and save that; returns the file. Raises CliError while it is unused."""
    if not config.is_token(request.token):
        raise UsageError(_("invalid join token. Make one on the Hosts page."))
    if is_exposed(request.url) and not request.insecure:
        raise UsageError(
            _("{url} is not encrypted. Nothing was sent.", url=request.url),
            _("Use the server's https:// URL, or --insecure on a trusted network: tokens and logs are sent."),
        )
    home = _make_home(request.home)
    from dstackweb.cli.client import Api

    api = Api(config.Settings(request.url, request.token, config.DEFAULT_PROJECT, "--token"))
    body = {
        "name": request.name,
        "url": request.url,
        "version": dstackweb.__version__,
        "labels": request.labels,
        "insecure": request.insecure,
        "nonce": secrets.token_hex(16),
    }
    found = api.post(api.path("hosts", "join"), body | {"check": True}, repeatable=True)
    if found["obstacles"]:
        raise CliError(
            _("this machine can't join {url} yet. The token is still valid.", url=request.url), *found["obstacles"]
        )
    token = api.post(api.path("hosts", "join"), body, repeatable=True)["token"]
    if os.getuid() != 0 and not os.environ.get("DSTACKWEB_SHARED_UID"):
        warn(_("not running as root: the host refuses jobs unless DSTACKWEB_SHARED_UID=1 lets them share its user"))
    settings = {
        "url": request.url,
        "name": request.name,
        "token": token,
        "insecure": request.insecure,
        "job_user": os.environ.get("DSTACKWEB_JOB_USER", ""),
        "job_writable": [folder for folder in os.environ.get("DSTACKWEB_JOB_WRITABLE", "").split(",") if folder],
        "engine": os.environ.get("DSTACKWEB_ENGINE", ""),
        "container_network": os.environ.get("DSTACKWEB_CONTAINER_NETWORK", ""),
        "job_volumes": [folder for folder in os.environ.get("DSTACKWEB_JOB_VOLUMES", "").split(",") if folder],
        "shared_uid": os.environ.get("DSTACKWEB_SHARED_UID", "") not in ("", "0", "false", "no"),
    }
    return config.write_private(home / HOST_CONFIG, [json.dumps(settings, indent=2), "\n"])


def start_host(home: Path, *, labels: Mapping[str, str], address: str) -> NoReturn:
    """Replace this process by the host's agent. Raises UsageError if this machine has not joined."""
    if not (home / HOST_CONFIG).exists():
        raise UsageError(
            _("this machine has not joined: {file} does not exist.", file=home / HOST_CONFIG),
            _("Deployment admins get the join command on the Hosts page."),
        )
    package = str(Path(dstackweb.__file__).resolve().parents[1])
    argv = [sys.executable, "-S", "-m", "dstackweb.runner", "host", "--home", str(home.resolve())]
    argv += [f"--label={name}={value}" for name, value in labels.items()]
    argv += [f"--address={address}"] if address else []
    sys.stdout.flush()
    os.execve(sys.executable, argv, {**os.environ, "PYTHONPATH": package})


def _make_home(home: Path) -> Path:
    """Make the host's home, which other users can enter: the directories of runs are in it."""
    try:
        home.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        message = _("can't create {file}: {reason}. Nothing was sent.", file=home, reason=error.strerror)
        raise CliError(message, _("Use another directory: --home DIR")) from None
    if not os.access(home, os.W_OK | os.X_OK):
        raise CliError(
            _("can't write to {folder}. Nothing was sent.", folder=home), _("Use another directory: --home DIR")
        )
    return home
