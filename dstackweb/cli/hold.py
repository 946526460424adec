"""`dstackweb hold` and `extend`: GPUs for a person to work on, and more time for what runs."""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.errors import INTERRUPTED, CliError, TryLater, Unreachable, UsageError
from dstackweb.cli.output import clean, clock_text, note

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

For = Annotated[str, typer.Option("--for", metavar="TIME", help="How long: 30m, 3h, 1d.")]


def hold(
    duration: For,
    gpu: Annotated[str, typer.Option(metavar="GPUS", help="A number, or a request such as A100:2.")] = "",
    cpu: Annotated[str, typer.Option(metavar="N", help="CPU cores, with GPUs or without.")] = "",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Such as 16GB.")] = "",
    name: Annotated[str, typer.Option(help="The run's name; one is made up without it.")] = "",
    priority: Annotated[int | None, typer.Option(help="0 to 100; higher goes first.")] = None,
    queue: Annotated[str, typer.Option(help="The queue to wait in.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until it ends, and show its log.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Don't wait; print the run's name.")] = False,
    extend: Annotated[str, typer.Option(metavar="RUN", help="Give this run the time of --for more, instead.")] = "",
) -> None:
    """Hold GPUs for interactive work: wait in the queue for them, then print where they are and the way in.

    They are kept until the time is over, `dstackweb stop RUN` gives them back before, `dstackweb extend` adds time.
    """
    if extend:
        if gpu or cpu or memory or name or queue or follow or detach or priority is not None:
            raise UsageError("--extend goes with --for alone: it gives a run more time, and makes no new hold.")
        _extend(_connect(), extend, duration)
        return
    if not (gpu or cpu):
        raise UsageError("say what to hold: --gpu, such as 1 or A100:2, or --cpu.")
    api = _connect()
    wanted = {"for": duration, "gpu": gpu, "cpu": cpu, "memory": memory, "name": name, "queue": queue}
    body: dict[str, Any] = {key: text for key, text in wanted.items() if text}
    if priority is not None:
        body["priority"] = priority
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    try:
        run = api.json(api.send("POST", api.in_project("holds"), json=body, headers=headers, repeatable=True))
    except KeyboardInterrupt:
        note("\nInterrupted: it may have been submitted, dstackweb ps tells.")
        raise typer.Exit(INTERRUPTED) from None
    if detach:
        note(f"Submitted {run['name']}. Its way in, once it has its place: dstackweb logs {run['name']}")
        typer.echo(run["name"])
        return
    raise typer.Exit(_stay(api, run, follow))


def extend(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name (the newest of it) or id.")],
    duration: Annotated[str, typer.Argument(metavar="TIME", help="How much more: 30m, 1h.")],
) -> None:
    """Give a placed run more time than its max_duration: a hold, or any other run."""
    _extend(_connect(), run, duration)


def _connect() -> Api:
    from dstackweb.cli.client import Api

    return Api(config.load())


def _extend(api: Api, name: str, duration: str) -> None:
    run = api.json(api.send("POST", api.in_project("runs", name, "extend"), json={"for": duration}))
    until = f"held until {clock_text(run['held_until'])}" if run["held_until"] else f"{duration} more"
    typer.echo(f"{clean(run['name'])}: {until}")


def _stay(api: Api, run: dict[str, Any], follow: bool) -> int:
    """Wait until the hold has its place, and say where that is; with `follow` stay until it ends."""
    from dstackweb.cli.logs import Cursor, Follower, StatusLine, status_text

    note(f"Submitted {run['name']}. Ctrl-C leaves it in the queue.")
    line = StatusLine()
    try:
        run = wait_for_place(api, run, lambda run: line.show(status_text(run)))
        line.clear()
        if follow and run["jobs"]:
            run = Follower(api, Cursor(attempt=run["attempt"])).follow(run)
    except KeyboardInterrupt:
        line.clear()
        return _interrupted(api, run)
    if run["hold"]:
        show_way_in(run)
    elif run["status"] == "done":
        note(status_text(run))
    else:
        raise CliError(f"it holds nothing: {status_text(run)}")
    return 0


def wait_for_place(
    api: Api,
    run: dict[str, Any],
    show: Callable[[dict[str, Any]], object],
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Ask for the run, through any silence of the server, until it runs or has ended; `show` is given each answer."""
    idle, failures = 0.3, 0
    while run["status"] in ("pending", "submitted", "provisioning", "terminating"):
        show(run)
        sleep(idle)
        idle = min(2.0, idle * 1.25)
        try:
            run = api.get(api.in_project("runs", run["id"]))
            failures = 0
        except (Unreachable, TryLater) as error:
            if not failures:
                note(f"{error.message} It keeps its place; trying again …")
            failures += 1
            sleep(random.uniform(0.1, min(5.0, 0.5 * 2 ** min(failures, 5))))
    return run


def show_way_in(run: dict[str, Any]) -> None:
    """Where a hold is, and what to type, on stdout; how to go on, on stderr."""
    held, name = run["hold"], clean(run["name"])
    where = clean(held["host"]) if held["here"] else f"{clean(held['host'])} ({clean(held['address'])})"
    gpus = len(held["gpus"])
    has = f"{gpus} GPU{'' if gpus == 1 else 's'}" if gpus else "no GPU"
    typer.echo(f"{name}: {where}, {has}, held until {clock_text(run['held_until'])}")
    if held["here"]:
        note("In a shell there, on the machine that dstackweb runs on:")
    for line in held["lines"]:
        typer.echo(f"  {clean(line)}")
    note(f"More time: dstackweb extend {name} 1h\nGive back: dstackweb stop {name}")


def _interrupted(api: Api, run: dict[str, Any]) -> int:
    """Ctrl-C: somebody at a terminal may give the place up; otherwise it is kept."""
    name, status = run["name"], run["status"]
    if sys.stdin.isatty() and status != "running":
        try:
            if typer.confirm("\nGive its place in the queue up?", default=False, err=True):
                api.send("POST", api.in_project("runs", run["id"], "stop"), json={})
                note(f"{name} has left the queue.")
                return INTERRUPTED
        except typer.Abort:
            note("")
    kept = "keeps what it holds" if status == "running" else "keeps its place in the queue"
    note(f"{name} {kept}.\n  its way in: dstackweb logs {name}\n  give back:  dstackweb stop {name}")
    return INTERRUPTED
