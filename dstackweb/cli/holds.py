"""`dstackweb hold`, `extend`, `ssh` and `key`: GPUs for interactive work, a shell there, and the keys that open it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import queue_names, run_names
from dstackweb.cli.language import _, age_text, clock_text, gpu_count
from dstackweb.cli.options import Commands, Json, Quiet, RunName, flag
from dstackweb.cli.output import ENDED, INTERRUPTED, CliError, UsageError, agreed, clean, echo, note, show_answer
from dstackweb.cli.runs import status_text
from dstackweb.cli.tables import Column, ItemColumns, rows_or, show_found


def hold(
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help=_("How long, e.g. 30m, 3h or 1d."))],
    gpu: Annotated[str, typer.Option(metavar="GPUS", help=_("A number, or a GPU request such as A100:2."))] = "",
    cpu: Annotated[str, typer.Option(metavar="N", help=_("CPU cores, with or without GPUs."))] = "",
    memory: Annotated[str, typer.Option(metavar="SIZE", help=_("Memory, e.g. 16GB."))] = "",
    name: Annotated[str, typer.Option(metavar="TEXT", help=_("The run's name; generated if empty."))] = "",
    priority: Annotated[int | None, typer.Option(metavar="N", help=_("0 to 100; higher starts first."))] = None,
    queue: Annotated[str, typer.Option(metavar="TEXT", help=_("Queue to wait in."), autocompletion=queue_names)] = "",
    follow: Annotated[bool, flag("--follow", "-f", help=_("Follow its log until it ends."))] = False,
    detach: Annotated[bool, flag("--detach", "-d", help=_("Don't wait; print the run's name."))] = False,
    extend: Annotated[
        str,
        typer.Option(metavar="RUN", help=_("Instead of a new hold, add --for to this run."), autocompletion=run_names),
    ] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Hold GPUs for interactive work: wait in the queue, then print how to connect.

    The GPUs are released when the time is over. `dstackweb stop RUN` releases them earlier, and `dstackweb extend`
    adds time.
    """
    if extend:
        if gpu or cpu or memory or name or queue or follow or detach or priority is not None:
            raise UsageError(_("--extend takes only --for: it adds time to a run and makes no new hold."))
        _extend(config.connect(), extend, duration, as_json, quiet)
        return
    if (as_json or quiet) and not detach:
        raise UsageError(_("--json and --quiet need --detach: otherwise the hold's connection details are printed."))
    if not (gpu or cpu):
        raise UsageError(_("nothing to hold. Use --gpu, e.g. 1 or A100:2, or --cpu."))
    api = config.connect()
    values = {"for": duration, "gpu": gpu, "cpu": cpu, "memory": memory, "name": name, "queue": queue}
    body: dict[str, Any] = {key: text for key, text in values.items() if text}
    if priority is not None:
        body["priority"] = priority
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    try:
        run = api.post(api.in_project("holds"), body, headers=headers, repeatable=True)
    except KeyboardInterrupt:
        note(_("\nInterrupted. The hold may have been submitted: check with dstackweb ps."))
        raise typer.Exit(INTERRUPTED) from None
    if detach:
        note(_("Submitted {name}. Connection details appear once it starts: dstackweb logs {name}", name=run["name"]))
        show_answer(run, run["name"], as_json, quiet)
        return
    raise typer.Exit(_wait(api, run, follow))


def extend(
    run: RunName,
    duration: Annotated[str, typer.Argument(metavar="TIME", help=_("Time to add, e.g. 30m or 1h."))],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Add time to a running hold, or to the max_duration of another run that has been placed."""
    _extend(config.connect(), run, duration, as_json, quiet)


def _extend(api: config.Api, name: str, duration: str, as_json: bool, quiet: bool) -> None:
    run = api.post(api.in_project("runs", name, "extend"), {"for": duration})
    until = (
        _("held until {time}", time=clock_text(run["held_until"]))
        if run["held_until"]
        else _("extended by {duration}", duration=duration)
    )
    show_answer(run, f"{clean(run['name'])}: {until}", as_json, quiet)


def _wait(api: config.Api, run: dict[str, Any], follow: bool) -> int:
    """Wait until the hold has started and print how to connect; with `follow` stay until it ends."""
    from dstackweb.cli.logs import Cursor, Follower, StatusLine

    note(_("Submitted {name}. Ctrl-C leaves it in the queue.", name=run["name"]))
    line = StatusLine()
    try:
        run = wait_for_start(api, run, lambda run: line.show(status_text(run)))
        line.clear()
        if follow and run["jobs"]:
            run = Follower(api, Cursor(attempt=run["attempt"])).follow(run)
    except KeyboardInterrupt:
        line.clear()
        return _interrupted(api, run)
    if run["hold"]:
        show_connection(run)
    elif run["status"] == "done":
        note(status_text(run))
    else:
        raise CliError(_("the hold did not start: {status}", status=status_text(run)))
    return 0


def wait_for_start(api: config.Api, run: dict[str, Any], show: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Poll the run, through outages of the server, until it runs or has ended; `show` gets each answer."""
    idle, path = 0.3, api.in_project("runs", run["id"])
    while run["status"] in ("pending", "submitted", "provisioning", "terminating"):
        show(run)
        api.sleep(idle)
        idle = min(2.0, idle * 1.25)
        run = api.until_answered(lambda: api.get(path), _("The hold keeps its position."))
    return run


def show_connection(run: dict[str, Any]) -> None:
    """On stdout the host and the commands that connect to it; on stderr how to extend and release it."""
    hold, name = run["hold"], clean(run["name"])
    host = clean(hold["host"]) if hold["here"] else f"{clean(hold['host'])} ({clean(hold['address'])})"
    gpus = gpu_count(len(hold["gpus"])) if hold["gpus"] else _("no GPU")
    values = {"name": name, "host": host, "gpus": gpus, "time": clock_text(run["held_until"])}
    echo(_("{name}: {host}, {gpus}, held until {time}", **values))
    if hold["here"]:
        note(_("In a shell on the dstackweb server:"))
    for line in hold["lines"]:
        echo(f"  {clean(line)}")
    if (run["connect"] or {}).get("ssh"):
        note(_("Or from your machine, with your key: dstackweb ssh {name}", name=name))
    note(_("Extend: dstackweb extend {name} 1h\nRelease: dstackweb stop {name}", name=name))


def _interrupted(api: config.Api, run: dict[str, Any]) -> int:
    """After Ctrl-C: at a terminal ask whether to cancel a hold that still waits; otherwise leave it."""
    name, status = run["name"], run["status"]
    if sys.stdin.isatty() and status != "running":
        try:
            if agreed(_("\nCancel {name}?", name=name)):
                api.send("POST", api.in_project("runs", run["id"], "stop"), json={})
                note(_("{name} was canceled.", name=name))
                return INTERRUPTED
        except typer.Abort:
            note("")
    if status == "running":
        kept = _("{name} keeps its GPUs.", name=name)
    else:
        kept = _("{name} stays in the queue.", name=name)
    ways = _("  connection details: dstackweb logs {name}\n  release:            dstackweb stop {name}", name=name)
    note(f"{kept}\n{ways}")
    return INTERRUPTED


keys_app = Commands(
    "key", help=_("Add, list and remove the SSH keys that open your dev environments."), no_args_is_help=True
)
USUAL = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")
READY_S = 60.0
"""How long a running run may take until its runner is connected."""


def ssh(
    run: RunName,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help=_("A command instead of a shell; after -- also ssh's own options.")),
    ] = None,
    print_only: Annotated[bool, flag("--print", help=_("Print the ssh command instead of running it."))] = False,
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


def _connected(api: config.Api, name: str) -> dict[str, Any]:
    """The run, once it runs and its runner is connected."""
    from dstackweb.cli.logs import StatusLine

    line = StatusLine()
    run = api.get(api.in_project("runs", name))
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


@keys_app.command("add")
def add_key(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help=_("A public key. Default: that of ~/.ssh."), show_default=False),
    ] = None,
    name: Annotated[str, typer.Option(metavar="TEXT", help=_("Where it is used; the key's comment if empty."))] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Add a public key to your account."""
    places = [file] if file else [Path.home() / ".ssh" / one for one in USUAL]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        missing = file or "~/.ssh/*.pub"
        raise UsageError(_("there is no public key {file}. Make one: ssh-keygen -t ed25519", file=missing))
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


@keys_app.command("list")
@keys_app.command("ls", hidden=True)
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


@keys_app.command("remove")
@keys_app.command("rm", hidden=True)
def remove_key(
    key: Annotated[int, typer.Argument(metavar="ID", help=_("As `dstackweb key list` shows it."))],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove one of your SSH keys."""
    api = config.connect()
    api.send("DELETE", api.path("user", "ssh-keys", str(key)))
    show_answer({"id": key}, _("key {id}: removed", id=key), as_json, quiet)
