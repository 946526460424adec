"""`dstackweb host …`: listing and managing hosts, and making this machine one: this process becomes its agent."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import dstackweb
from dstackweb.cli import config
from dstackweb.cli.completion import host_names
from dstackweb.cli.language import _, _n, age_text, clock_text, job_count, listed
from dstackweb.cli.options import Commands, Json, Quiet, Yes, flag
from dstackweb.cli.output import CliError, UsageError, confirm, echo, note, show_answer, warn
from dstackweb.cli.tables import Column, ItemColumns, rows_or, show_found
from dstackweb.lib.network import is_exposed, machine_name
from dstackweb.runner.state import HOST_CONFIG
from dstackweb.spec.labels import read_pair

app = Commands("host", help=_("Manage hosts, or make this machine a host."), no_args_is_help=True)

HostName = Annotated[str, typer.Argument(metavar="NAME", help=_("The host's name."), autocompletion=host_names)]
Home = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", envvar="DSTACKWEB_HOST_HOME", help=_("Directory for the host's files."), show_default=False
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="NAME=VALUE", help=_("A label that runs can require; repeatable.")),
]
Address = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help=_("Address at which other nodes, and users of holds, reach this machine.")),
]


@app.command("list")
@app.command("ls", hidden=True)
def list_hosts(as_json: Json = False, quiet: Quiet = False) -> None:
    """List hosts with their state, usage and labels."""
    api = config.connect()
    page = api.get(api.path("hosts"))
    show_found(page, rows_or(_("No hosts."), COLUMNS, page["items"]), as_json, quiet, "name")


def labels_of(host: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(host["labels"].items()))


def limits_of(host: dict[str, Any]) -> str:
    cgroups = host.get("cgroups") or {}  # older servers don't send it
    if cgroups.get("code"):
        return _("none")
    return f"cgroups {cgroups['version']}" if cgroups.get("version") else _("unknown")


def state_of(host: dict[str, Any]) -> str:
    """A host's state: `online`, `offline`, `held back`, `draining`, `leaving`, `offline, draining` …"""
    states = []
    if not host["online"]:
        states.append(_("offline"))
    if host["held_back_at"]:
        states.append(_("held back"))
    if host["leaving"] or host["draining"]:
        states.append(_("leaving") if host["leaving"] else _("draining"))
    return listed(states) or _("online")


def error_of(host: dict[str, Any]) -> str:
    start_error = host["start_error"]
    if start_error == "commands_fail":
        start_error = _("commands of three runs ended within 5 s as not found or not executable (126, 127)")
    return "; ".join(filter(None, [host["error"], start_error]))


COLUMNS: ItemColumns = {
    Column("NAME"): itemgetter("name"),
    Column("STATE"): state_of,
    Column("GPUS", right=True): lambda host: f"{host['gpus_used']}/{host['gpus_total']}",
    Column("CPUS", right=True): lambda host: f"{host['cpus_used']}/{host['cpus']}",
    Column("MEMORY", right=True): lambda host: (
        f"{host['memory_used_mib'] / 1024:.0f}/{host['memory_mib'] / 1024:.0f} GB"
    ),
    Column("JOBS", right=True): itemgetter("jobs"),
    Column("LIMITS"): limits_of,
    Column("LABELS", wide=True): labels_of,
    Column("SEEN", right=True): lambda host: age_text(host["seen_at"]),
    Column("ERROR", wide=True): error_of,
}
"""Of hosts, the items of `GET /hosts`."""


@app.command()
def drain(name: HostName, as_json: Json = False) -> None:
    """Stop placing jobs on a host; running jobs continue."""
    _show_state(_patch(name, {"draining": True}), as_json)


@app.command()
def undrain(name: HostName, as_json: Json = False) -> None:
    """Place jobs on a host again. This also cancels its removal."""
    _show_state(_patch(name, {"draining": False}), as_json)


@app.command()
def label(
    name: HostName,
    labels: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE|NAME-", help=_("Set, or with NAME- remove, a label."))
    ],
    as_json: Json = False,
) -> None:
    """Set or remove labels that runs can require."""
    host = _patch(name, {"labels": dict(_change(text) for text in labels)})
    shown = labels_of(host) or _("no labels")
    show_answer(host, f"{host['name']}: {shown}", as_json)


def _change(text: str) -> tuple[str, str | None]:
    if "=" not in text and text.endswith("-") and text != "-":
        return text[:-1], None
    return _pair(text)


def _pair(text: str) -> tuple[str, str]:
    try:
        return read_pair(text)
    except ValueError as error:
        raise UsageError(_("invalid label: {reason}.", reason=error)) from None


@app.command()
def leave(name: HostName, as_json: Json = False) -> None:
    """Remove a host: it gets no new jobs, and disappears when its running jobs have ended."""
    api = config.connect()
    # Repeatable: removing a host that is already leaving changes nothing.
    host = api.post(api.path("hosts", name, "leave"), repeatable=True)
    name = host["name"]
    jobs = _n(
        "{name} gets no new jobs and is removed when its {n:,} job ended.",
        "{name} gets no new jobs and is removed when its {n:,} jobs ended.",
        host["jobs"],
        name=name,
    )
    show_answer(host, jobs if host["jobs"] else _("{name} gets no new jobs and is removed now.", name=name), as_json)
    if not host["online"] and host["jobs"]:
        text = _("It is offline. If the machine is gone for good: dstackweb host gone {name} --reason TEXT", name=name)
        note(text)
    note(_("To cancel: dstackweb host undrain {name}", name=name))


@app.command()
def clear(name: HostName, as_json: Json = False) -> None:
    """Place jobs again on a host that is held back because starts failed."""
    api = config.connect()
    _show_state(api.post(api.path("hosts", name, "clear"), repeatable=True), as_json)


@app.command()
def revoke(name: HostName) -> None:
    """Revoke a host's token: the server refuses its agent until the machine joins again. Running jobs continue."""
    api = config.connect()
    api.send("POST", api.path("hosts", name, "revoke"), repeatable=True)
    echo(_("{name} must join again: its token is revoked. Its running jobs continue.", name=name))


@app.command()
def gone(
    name: HostName,
    reason: Annotated[str, typer.Option(metavar="TEXT", help=_("How you know that it is gone; everyone can read it."))],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Declare that an offline host's machine is gone: end its jobs and free what they held.

    Runs with `retry` start again elsewhere. Do this only if the machine is off for good: nothing stops its processes.
    """
    api = config.connect()
    question = _("Is the machine of {name} gone for good? Its jobs end", name=name)
    confirm(question, yes, _("Nothing was changed."))
    answer = api.post(api.path("hosts", name, "gone"), {"reason": reason})
    ended = _n("{name}: {n:,} job ended.", "{name}: {n:,} jobs ended.", answer["ended"], name=name)
    show_answer(answer, ended, as_json)
    note(_("To remove the host: dstackweb host leave {name}", name=name))


def _patch(name: str, body: dict[str, Any]) -> dict[str, Any]:
    api = config.connect()
    return api.patch(api.path("hosts", name), body, repeatable=True)


def _show_state(host: dict[str, Any], as_json: bool) -> None:
    text = f"{host['name']}: {state_of(host)}"
    if host["draining"] and host["jobs"]:
        text = _("{text}; {jobs} still running", text=text, jobs=job_count(host["jobs"]))
    show_answer(host, text, as_json)


@app.command()
def invite(as_json: Json = False) -> None:
    """Print the command that makes another machine a host. It works once, within an hour. For deployment admins."""
    api = config.connect()
    made = api.post(api.path("hosts", "invites"))
    show_answer(made, made["command"], as_json)
    until = clock_text(made["expires_at"])
    note(_("Works once, until {time}. Keep it secret: it makes a machine a host.", time=until))
    for obstacle in made["obstacles"]:
        note(_("Cannot add a host: {obstacle}.", obstacle=obstacle))


@app.command(is_local=True)
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help=_("The server's URL, reachable from this machine."))],
    token: Annotated[
        str, typer.Option(metavar="TEXT", envvar="DSTACKWEB_JOIN_TOKEN", help=_("The join token, from the Hosts page."))
    ],
    name: Annotated[str, typer.Option(metavar="TEXT", help=_("The host's name; the machine's name if empty."))] = "",
    labels: Labels = None,
    address: Address = "",
    home: Home = None,
    insecure: Annotated[bool, flag("--insecure", help=_("Allow plain HTTP on a trusted network."))] = False,
    start: Annotated[bool, flag("--start/--no-start", help=_("Start the host after joining."))] = True,
) -> None:
    """Make this machine a host of the deployment, and start it.

    It must reach the server's HTTPS URL, and needs dstackweb in the server's version. If something is in the way, the
    command says what, and the join token stays valid.

    The host's own token is saved in host.json in the host's home (/var/lib/dstackweb-host for root, otherwise
    ~/.local/share/dstackweb-host), readable by this user only. `dstackweb host run` starts the host again.

    Run this as root to isolate jobs in another user, or set DSTACKWEB_SHARED_UID=1 if all users are trusted.
    """
    url, name, given = config.normal_url(url), name or machine_name(), dict(map(_pair, labels or ()))
    file = use_token(home or default_home(), url, token.strip(), name=name, labels=given, insecure=insecure)
    values = {"name": name, "url": url, "file": file}
    echo(_("{name} joined {url}. Its token is in {file}, readable by this user only.", **values))
    again = f"dstackweb host run --home {home}" if home else "dstackweb host run"
    note(_("To start it again, for example in a service: {command}", command=again))
    if start:
        start_host(home or default_home(), labels=given, address=address)


@app.command(is_local=True)
def run(home: Home = None, labels: Labels = None, address: Address = "") -> None:
    """Run the host that this machine joined as. Jobs continue when it stops."""
    start_host(home or default_home(), labels=dict(map(_pair, labels or ())), address=address)


def default_home() -> Path:
    if os.getuid() == 0:
        return Path("/var/lib/dstackweb-host")
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "dstackweb-host"


def use_token(home: Path, url: str, token: str, *, name: str, labels: dict[str, str], insecure: bool) -> Path:
    """Exchange the token for the host's own, and save that; returns the file. Raises CliError while it is unused."""
    if not config.is_token(token):
        raise UsageError(_("invalid join token. Make one on the Hosts page."))
    if is_exposed(url) and not insecure:
        raise UsageError(
            _("{url} is not encrypted. Nothing was sent.", url=url),
            _("Use the server's https:// URL, or --insecure on a trusted network: tokens and logs are sent."),
        )
    _make_home(home)
    from dstackweb.cli.client import Api

    api = Api(config.Settings(url, token, config.DEFAULT_PROJECT, "--token"))
    asked = {"name": name, "url": url, "insecure": insecure}
    body = {**asked, "version": dstackweb.__version__, "labels": labels, "nonce": secrets.token_hex(16)}
    found = api.post(api.path("hosts", "join"), body | {"check": True}, repeatable=True)
    if found["obstacles"]:
        raise CliError(_("this machine can't join {url} yet. The token is still valid.", url=url), *found["obstacles"])
    own = api.post(api.path("hosts", "join"), body, repeatable=True)["token"]
    if os.getuid() != 0 and not os.environ.get("DSTACKWEB_SHARED_UID"):
        warn(_("not running as root: the host refuses jobs unless DSTACKWEB_SHARED_UID=1 lets them share its user"))
    settings = {
        "url": url,
        "name": name,
        "token": own,
        "insecure": insecure,
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


def _make_home(home: Path) -> None:
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
