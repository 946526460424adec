"""`dstackweb host …`: listing and managing hosts, and making this machine a host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.errors import UsageError
from dstackweb.cli.output import Column, Json, age_text, clock_text, note, plural, show_json, show_table

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Manage hosts, or make this machine a host.",
)

HostName = Annotated[str, typer.Argument(metavar="NAME", help="The host's name.")]
Home = Annotated[
    Path | None,
    typer.Option(envvar="DSTACKWEB_HOST_HOME", help="Directory for the host's files.", show_default=False),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="NAME=VALUE", help="A label that runs can require; repeatable."),
]
Address = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Address at which other nodes, and users of holds, reach this machine.")
]


@app.command("ls")
def list_hosts(as_json: Json = False) -> None:
    """List hosts with their state, usage and labels."""
    api = config.connect()
    page = api.get(api.path("hosts"))
    if as_json:
        show_json(page)
        return
    if not page["items"]:
        note("No hosts.")
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
    """A host's state: `online`, `offline`, `draining`, `leaving`, `offline, draining` …"""
    closing = "leaving" if host["leaving"] else "draining" if host["draining"] else ""
    if not host["online"]:
        return f"offline, {closing}" if closing else "offline"
    return closing or "online"


@app.command()
def drain(name: HostName) -> None:
    """Stop placing jobs on a host; running jobs continue."""
    _show_state(_patch(name, {"draining": True}))


@app.command()
def undrain(name: HostName) -> None:
    """Place jobs on a host again. This also cancels its removal."""
    _show_state(_patch(name, {"draining": False}))


@app.command()
def label(
    name: HostName,
    labels: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE|NAME-…", help="Set, or with NAME- remove, a label.")
    ],
) -> None:
    """Set or remove labels that runs can require: dstackweb host label box disk=nvme rack-"""
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
        raise UsageError(f"invalid label {text!r}. Example: region=eu")
    return name.strip(), value.strip()


@app.command()
def leave(name: HostName) -> None:
    """Remove a host: it gets no new jobs, and disappears when its running jobs have ended."""
    api = config.connect()
    # Repeatable: removing a host that is already leaving changes nothing.
    host = api.json(api.send("POST", api.path("hosts", name, "leave"), repeatable=True))
    after = f"when its {plural(host['jobs'], 'job')} ended" if host["jobs"] else "now"
    typer.echo(f"{host['name']} gets no new jobs and is removed {after}.")
    if not host["online"] and host["jobs"]:
        note("It is offline. If the machine is off for good, end its jobs on the server: manage.py give_up")
    note(f"To cancel: dstackweb host undrain {host['name']}")


def _patch(name: str, body: dict[str, Any]) -> dict[str, Any]:
    api = config.connect()
    found: dict[str, Any] = api.json(api.send("PATCH", api.path("hosts", name), json=body, repeatable=True))
    return found


def _show_state(host: dict[str, Any]) -> None:
    jobs = f"; {plural(host['jobs'], 'job')} still running" if host["draining"] and host["jobs"] else ""
    typer.echo(f"{host['name']}: {state_of(host)}{jobs}")


@app.command()
def invite() -> None:
    """Print the command that makes another machine a host. It works once, within an hour. For deployment admins."""
    api = config.connect()
    made = api.json(api.send("POST", api.path("hosts", "invites")))
    typer.echo(made["command"])
    note(f"Works once, until {clock_text(made['expires_at'])}. It gives full access to the deployment: keep it secret.")
    for obstacle in made["obstacles"]:
        note(f"Cannot add a host: {obstacle}.")


@app.command()
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's URL, reachable from this machine.")],
    token: Annotated[str, typer.Option(envvar="DSTACKWEB_JOIN_TOKEN", help="The join token, from the Hosts page.")],
    name: Annotated[str, typer.Option(help="The host's name; the machine's name if empty.")] = "",
    labels: Labels = None,
    address: Address = "",
    home: Home = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plain HTTP on a trusted network.")] = False,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start the host after joining.")] = True,
) -> None:
    """Make this machine a host of the deployment, and start it.

    This machine needs dstackweb\\[server] in the server's version.

    It must reach the server's HTTPS URL, its PostgreSQL and, if it has one, its Redis. If something can't be reached,
    the command lists it and exits; the token stays valid.

    Addresses and keys are saved in host.env in the host's home (/var/lib/dstackweb-host for root, otherwise
    ~/.local/share/dstackweb-host), readable by this user only. `dstackweb host run` starts the host again.

    Run this as root to isolate jobs in another user, or set DSTACKWEB_SHARED_UID=1 if all users are trusted.
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
    typer.echo(f"{request.name} joined {request.url}. Its keys are in {file}, readable by this user only.")
    again = f"dstackweb host run --home {request.home}" if home else "dstackweb host run"
    note(f"To start it again, for example in a service: {again}")
    if start:
        joining.run(request.home, labels=request.labels, address=address)


@app.command()
def run(home: Home = None, labels: Labels = None, address: Address = "") -> None:
    """Run the host that this machine joined as. Jobs continue when it stops."""
    from dstackweb.cli import joining

    joining.run(home or joining.default_home(), labels=dict(_pair(text) for text in labels or ()), address=address)
