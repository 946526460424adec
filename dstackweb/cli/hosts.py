"""`dstackweb host …`: the team's own machines from a shell, and this machine as one of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.errors import UsageError
from dstackweb.cli.output import Column, age_text, clock_text, note, show_json, show_table

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look after the team's own machines, or make this one a host.",
)

HostName = Annotated[str, typer.Argument(metavar="NAME", help="The host's name.")]
Home = Annotated[
    Path | None,
    typer.Option(envvar="DSTACKWEB_HOST_HOME", help="Where this host keeps its files.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="As the API gives it, for scripts.")]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="NAME=VALUE", help="A label that runs can ask for; again for more."),
]
Address = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Where a run's other nodes, and people with a hold, reach this machine.")
]


def _connect() -> Api:
    from dstackweb.cli.client import Api

    return Api(config.load())


def _path(*parts: str) -> str:
    from dstackweb.cli.client import BASE, quoted

    return "/".join([f"{BASE}/hosts", *quoted(*parts)])


@app.command("ls")
def list_hosts(as_json: Json = False) -> None:
    """List the hosts: what is used of what they have, their labels, and how they do."""
    page = _connect().get(_path())
    if as_json:
        show_json(page)
        return
    if not page["items"]:
        note("No host is registered.")
        return
    amounts = [Column(title, right=True) for title in ("GPUS", "CPUS", "MEMORY", "JOBS")]
    columns = [Column("NAME"), Column("STATE"), *amounts, Column("LABELS", wide=True), Column("SEEN", right=True)]
    show_table([*columns, Column("ERROR", wide=True)], [_row(host) for host in page["items"]])


def _row(host: dict[str, Any]) -> tuple[object, ...]:
    return (
        host["name"],
        state_of(host),
        f"{host['gpus_used']}/{host['gpus_total']}",
        f"{host['cpus_used']}/{host['cpus']}",
        f"{host['memory_used_mib'] / 1024:.0f}/{host['memory_mib'] / 1024:.0f} GB",
        host["jobs"],
        " ".join(f"{name}={value}" for name, value in sorted(host["labels"].items())),
        age_text(host["seen_at"]),
        host["error"],
    )


def state_of(host: dict[str, Any]) -> str:
    """One word or two for how a host is: `online`, `offline`, `draining`, `leaving`."""
    doing = "leaving" if host["leaving"] else "draining" if host["draining"] else ""
    if not host["online"]:
        return f"offline, {doing}" if doing else "offline"
    return doing or "online"


@app.command()
def drain(name: HostName) -> None:
    """Let a host take no new jobs; those that run go on."""
    _told(_patch(name, {"draining": True}))


@app.command()
def undrain(name: HostName) -> None:
    """Let a host take jobs again; if it was to leave, it stays."""
    _told(_patch(name, {"draining": False}))


@app.command()
def label(
    name: HostName,
    labels: Annotated[list[str], typer.Argument(metavar="NAME=VALUE|NAME-…", help="Set a label, or take it away.")],
) -> None:
    """Set labels that runs can ask for, or take them away: dstackweb host label box disk=nvme rack-"""
    host = _patch(name, {"labels": dict(_change(text) for text in labels)})
    shown = " ".join(f"{name}={value}" for name, value in sorted(host["labels"].items()))
    typer.echo(f"{host['name']}: {shown or 'no labels'}")


def _change(text: str) -> tuple[str, str | None]:
    if "=" not in text and text.endswith("-") and text != "-":
        return text[:-1], None
    return _pair(text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise UsageError(f"{text!r} is no label such as region=eu.")
    return name.strip(), value.strip()


@app.command()
def leave(name: HostName) -> None:
    """Have a host leave: it takes no new jobs, and is gone once those that run there have ended."""
    api = _connect()
    # Asked again it does no harm: it is leaving already.
    host = api.json(api.send("POST", _path(name, "leave"), repeatable=True))
    after = f"once {_jobs(host)} ended" if host["jobs"] else "now"
    typer.echo(f"{host['name']} takes no new jobs and leaves {after}.")
    if not host["online"] and host["jobs"]:
        note("It is offline: end its jobs with manage.py give_up once you are sure that the machine is off.")
    note(f"It stays all the same with: dstackweb host undrain {host['name']}")


def _jobs(host: dict[str, Any]) -> str:
    return "its job has" if host["jobs"] == 1 else f"its {host['jobs']} jobs have"


def _patch(name: str, body: dict[str, Any]) -> dict[str, Any]:
    api = _connect()
    found: dict[str, Any] = api.json(api.send("PATCH", _path(name), json=body, repeatable=True))
    return found


def _told(host: dict[str, Any]) -> None:
    empty = f"; empty once {_jobs(host)} ended" if host["draining"] and host["jobs"] else ""
    typer.echo(f"{host['name']}: {state_of(host)}{empty}")


@app.command()
def invite() -> None:
    """Print the command with which another machine joins; it works once, for an hour. For deployment admins."""
    api = _connect()
    made = api.json(api.send("POST", _path("invites")))
    typer.echo(made["command"])
    note(f"Works once, until {clock_text(made['expires_at'])}. Whoever runs it gets all that the server can do.")
    for obstacle in made["obstacles"]:
        note(f"In the way of another machine: {obstacle}.")


@app.command()
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, as this machine reaches it.")],
    token: Annotated[str, typer.Option(envvar="DSTACKWEB_JOIN_TOKEN", help="The join token, from the hosts page.")],
    name: Annotated[str, typer.Option(help="The host's name; by default the machine's.")] = "",
    labels: Labels = None,
    address: Address = "",
    home: Home = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain HTTP will do: a network that you trust.")] = False,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Go on as the host at once.")] = True,
) -> None:
    """Make this machine a host of the deployment, and go on as it.

    It needs, here: dstackweb\\[server] in the server's version.

    It needs, from here: the server's HTTPS address, for the jobs; its PostgreSQL and, where it has one, its Redis, for
    the host itself. What is missing is told, one line each, and the token stays good.

    The addresses and keys that it gets are kept in host.env in the host's home (/var/lib/dstackweb-host for root, else
    ~/.local/share/dstackweb-host), readable by this user alone. `dstackweb host run` starts the host again.

    Run it as root, so that jobs run as another user, or set DSTACKWEB_SHARED_UID=1 where everybody is trusted.
    """
    from dstackweb.cli import joining

    request = joining.Request(
        url=config.normal_url(url),
        token=token.strip(),
        name=name or joining.machine_name(),
        labels=dict(_pair(text) for text in labels or ()),
        insecure=insecure,
        home=home or joining.default_home(),
    )
    file = joining.join(request)
    typer.echo(f"{request.name} has joined {request.url}; its keys are in {file}, readable by this user alone.")
    again = f"dstackweb host run --home {request.home}" if home else "dstackweb host run"
    note(f"To start it again, in a service for instance: {again}")
    if start:
        joining.run(request.home, labels=request.labels, address=address)


@app.command()
def run(home: Home = None, labels: Labels = None, address: Address = "") -> None:
    """Be the host that this machine joined as, until stopped. Jobs outlive it."""
    from dstackweb.cli import joining

    joining.run(home or joining.default_home(), labels=dict(_pair(text) for text in labels or ()), address=address)
