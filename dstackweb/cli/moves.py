"""`dstackweb move`: where waiting runs stand in their queue, what a move would do, and taking it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.errors import CliError, Refused, UsageError
from dstackweb.cli.output import clean, note

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

Runs = Annotated[list[str] | None, typer.Argument(metavar="RUN…", help="Runs, by name or id.")]


def move(
    runs: Runs = None,
    before: Annotated[str, typer.Option(metavar="RUN", help="Right ahead of this run.")] = "",
    after: Annotated[str, typer.Option(metavar="RUN", help="Right behind this run.")] = "",
    top: Annotated[bool, typer.Option("--top", help="To the head of the queue.")] = False,
    bottom: Annotated[bool, typer.Option("--bottom", help="To the end of the queue.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do; change nothing.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take your latest move back, within ten seconds.")] = False,
    queue: Annotated[str, typer.Option(help="The queue that --undo looks in, if not in default.")] = "",
) -> None:
    """Move waiting runs to another place in their queue; several keep their order among each other.

    Managers' runs stand exactly there. Members move their own, which change places among each other, so that nobody
    else's position changes.
    """
    api = _connect()
    target = {"before": before, "after": after, "top": top, "bottom": bottom}
    given: dict[str, Any] = {where: value for where, value in target.items() if value}
    if undo:
        if runs or given or dry_run:
            raise UsageError("--undo goes by itself: it takes back your latest move.")
        _undo(api, queue)
        return
    if queue:
        raise UsageError("--queue goes with --undo: a run is moved in the queue that it is in.")
    if not runs or len(given) != 1:
        raise UsageError("name the runs to move, and one of --before, --after, --top and --bottom.")
    _move(api, runs, given, dry_run)


def _connect() -> Api:
    from dstackweb.cli.client import Api

    return Api(config.load())


def _move(api: Api, runs: list[str], target: dict[str, Any], dry_run: bool) -> None:
    seen = [api.send("GET", api.in_project("runs", run)) for run in runs]
    found = [api.json(response) for response in seen]
    queues = {run["queue"] for run in found}
    if len(queues) > 1:
        raise CliError(f"these runs are in several queues: {clean(', '.join(sorted(queues)))}. Nothing was moved.")
    # By id: a newer run may take the name meanwhile. Only what was just seen is moved, where one run is.
    body = {"runs": [run["id"] for run in found], "dry_run": dry_run, **target}
    headers = {"If-Match": seen[0].headers["ETag"]} if len(seen) == 1 and not dry_run else {}
    queue = found[0]["queue"]
    try:
        told = api.json(api.send("POST", api.in_project("queues", queue, "move"), json=body, headers=headers))
    except Refused as refused:
        if refused.status != 412:
            raise
        raise CliError(refused.message, "To move it all the same: run the command again.") from None
    if not told["changes"]:
        note("Nothing to do: it stands there already." if len(found) == 1 else "Nothing to do: they stand there.")
        return
    _print(told)
    if not told["exact"]:
        note("That is the nearest of your own places: only a manager moves a run past those of others.")
    if dry_run:
        note("Nothing was moved.")
    else:
        note(f"Undo within {told['undo_s']} s: dstackweb move --undo{_in(queue)}")


def _in(queue: str) -> str:
    return "" if queue == "default" else f" --queue {clean(queue)}"


def _undo(api: Api, queue: str) -> None:
    try:
        told = api.json(api.send("POST", api.in_project("queues", queue or "default", "undo"), json={}))
    except Refused as refused:
        if queue or refused.status != 409:
            raise
        raise CliError(refused.message, "A move in another queue: dstackweb move --undo --queue NAME") from None
    _print(told)
    note("As before.")


def _print(told: dict[str, Any]) -> None:
    """A line for each run moved; what it means for the others, in the last."""
    lines = [f"{clean(change['run'])}: {_change_text(change)}" for change in told["changes"]]
    if slips := [_slip_text(change) for change in told["slips"]]:
        more = (told["slips_total"] or 0) - len(slips)
        lines[-1] += "; " + ", ".join([*slips, *([f"{more} more change their position"] if more > 0 else [])])
    for line in lines:
        typer.echo(line)


def _change_text(change: dict[str, Any]) -> str:
    parts = []
    before, after = change["position_before"], change["position_after"]
    if before is not None and after is not None and before != after:
        parts.append(f"position {before} → {after}")
    elif before is None and after is not None:
        parts.append(f"at position {after} now")
    if change["priority_before"] != change["priority_after"]:
        parts.append(f"priority {change['priority_before']} → {change['priority_after']}")
    return ", ".join(parts) or ("moved" if after is None else f"stays at position {after}")


def _slip_text(change: dict[str, Any]) -> str:
    before, after = change["position_before"], change["position_after"]
    verb = "slips" if after > before else "rises"
    text = f"{clean(change['user'])}'s {clean(change['run'])} {verb} from {before} to {after}"
    if change["priority_before"] != change["priority_after"]:
        text += f" with priority {change['priority_after']}"
    return text
