"""`dstackweb ssh` and `dstackweb key`: a shell in a dev environment, and the keys that open it."""

from __future__ import annotations

import os
import shlex
import shutil
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.holds import wait_for_start
from dstackweb.cli.language import _
from dstackweb.cli.output import (
    ENDED,
    CliError,
    Json,
    Quiet,
    RunName,
    UsageError,
    clean,
    echo,
    group,
    note,
    show_answer,
)
from dstackweb.cli.runs import status_text
from dstackweb.cli.tables import Column, ItemColumns, rows_or, show_found
from dstackweb.cli.values import age_text

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

app = group("Add, list and remove the SSH keys that open your dev environments.")
USUAL = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")
READY_S = 60.0
"""How long a running run may take until its runner is connected."""


def ssh(
    run: RunName,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="A command instead of a shell; after -- also ssh's own options."),
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the ssh command instead of running it.")] = False,
) -> None:
    """Open a shell in a dev environment or a hold, once it has started.

    Your public key has to be there: `dstackweb key add`. For VS Code and port forwarding, see `--print`.
    """
    api = config.connect()
    found = _connected(api, run)
    line = (found["connect"] or {}).get("ssh")
    if not line:
        raise CliError(_("can't connect to {status}", status=status_text(found)))
    words = [*shlex.split(line), *(command or [])]
    if print_only:
        echo(clean(shlex.join(words)))
        return
    if not api.get(api.path("user", "ssh-keys"))["items"]:
        raise CliError(_("you have added no SSH key."), _("Add yours: dstackweb key add"))
    if shutil.which("ssh") is None:
        raise UsageError(_("there is no ssh on this machine."))
    os.execvp("ssh", words)


def _connected(api: Api, name: str) -> dict[str, Any]:
    """The run, once it runs and its runner is connected."""
    from dstackweb.cli.logs import StatusLine

    line = StatusLine()
    run: dict[str, Any] = api.get(api.in_project("runs", name))
    if run["status"] not in ENDED:
        run = wait_for_start(api, run, lambda run: line.show(status_text(run)))
    waited = 0.0
    while run["connect"] and not run["connect"]["ready"] and waited < READY_S:
        line.show(_("{name}: its runner is connecting", name=clean(run["name"])))
        api.sleep(1.0)
        waited += 1.0
        run = api.get(api.in_project("runs", run["id"]))
    line.clear()
    return run


@app.command("add")
def add_key(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A public key. Default: that of ~/.ssh.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="Where it is used; the key's comment if empty.")] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Add a public key to your account."""
    places = [file] if file else [Path.home() / ".ssh" / one for one in USUAL]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UsageError(
            _(
                "there is no public key {file}. Make one: ssh-keygen -t ed25519",
                file=places[0] if file else "~/.ssh/*.pub",
            )
        )
    try:
        text = found.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(_("{file} can't be read: {reason}.", file=found, reason=error.strerror or error)) from None
    if "PRIVATE KEY" in text:
        raise UsageError(_("{file} is a private key, which stays with you. Give the .pub file.", file=found))
    api = config.connect()
    key = api.post(api.path("user", "ssh-keys"), {"public_key": text.strip(), "name": name})
    show_answer(
        key, _("{name}: added, {fingerprint}", name=clean(key["name"]), fingerprint=key["fingerprint"]), as_json, quiet
    )


@app.command("list")
@app.command("ls", hidden=True)
def list_keys(as_json: Json = False, quiet: Quiet = False) -> None:
    """List your SSH keys, and the fingerprint by which you know the server."""
    api = config.connect()
    found = api.get(api.path("user", "ssh-keys"))
    columns: ItemColumns = {
        Column("ID", right=True): itemgetter("id"),
        Column("NAME", wide=True): itemgetter("name"),
        Column("FINGERPRINT"): itemgetter("fingerprint"),
        Column("LAST USED"): lambda key: age_text(key["last_used_at"]) if key["last_used_at"] else _("never"),
    }
    view = rows_or(_("No SSH keys. Add yours: dstackweb key add"), columns, found["items"])
    show_found(found, view, as_json, quiet)
    if not (as_json or quiet) and (server := found["gateway"])["fingerprint"]:
        note(_("The server's own key: {fingerprint}", fingerprint=server["fingerprint"]))


@app.command("remove")
@app.command("rm", hidden=True)
def remove_key(
    key: Annotated[int, typer.Argument(metavar="ID", help="As `dstackweb key list` shows it.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove one of your SSH keys."""
    api = config.connect()
    api.send("DELETE", api.path("user", "ssh-keys", str(key)))
    show_answer({"id": key}, _("key {id}: removed", id=key), as_json, quiet)
