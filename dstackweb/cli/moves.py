"""`dstackweb move`: move waiting runs in their queue, and undo that."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import queue_names, run_names
from dstackweb.cli.language import _, _n, duration_text, listed, start_text, word
from dstackweb.cli.options import Json, Quiet, flag
from dstackweb.cli.output import ApiError, CliError, UsageError, clean, echo, note, show_ids, show_json


def move(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help=_("Names or ids of runs."), autocompletion=run_names)
    ] = None,
    before: Annotated[
        str, typer.Option(metavar="RUN", help=_("Directly before this run."), autocompletion=run_names)
    ] = "",
    after: Annotated[
        str, typer.Option(metavar="RUN", help=_("Directly after this run."), autocompletion=run_names)
    ] = "",
    top: Annotated[bool, flag("--top", help=_("To the start of the queue."))] = False,
    bottom: Annotated[bool, flag("--bottom", help=_("To the end of the queue."))] = False,
    to: Annotated[str, typer.Option(metavar="QUEUE", help=_("To another queue."), autocompletion=queue_names)] = "",
    member: Annotated[str, typer.Option(metavar="NAME", help=_("With --to: all waiting runs of this member."))] = "",
    dry_run: Annotated[bool, flag("--dry-run", help=_("Show the effect without moving."))] = False,
    undo: Annotated[bool, flag("--undo", help=_("Undo your latest move, within ten seconds."))] = False,
    queue: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help=_("Queue of the move to undo, or of --member; default if empty."),
            autocompletion=queue_names,
        ),
    ] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Move waiting runs to another position in their queue, or to another queue. Several runs keep their order.

    Managers move runs to any position. Members move their own runs, which swap positions with each other: the
    positions of other members' runs don't change.
    """
    api = config.connect()
    target = {"before": before, "after": after, "top": top, "bottom": bottom, "queue": to}
    given: dict[str, Any] = {where: value for where, value in target.items() if value}
    if undo:
        if runs or given or dry_run or member:
            raise UsageError(_("--undo takes no runs and no position: it undoes your latest move."))
        _print(_undo(api, queue), as_json, quiet)
        note(_("Undone."))
        return
    if member:
        if runs or list(given) != ["queue"]:
            raise UsageError(
                _("--member moves all waiting runs of a member: name no runs, and the new queue with --to.")
            )
        body = {"member": member, "dry_run": dry_run, **given}
        _print_move(api.post(api.in_project("queues", queue or "default", "move"), body), "", dry_run, as_json, quiet)
        return
    if queue:
        raise UsageError(_("--queue is only for --undo and --member. To move runs to another queue: --to."))
    if not runs or len(given) != 1:
        raise UsageError(_("name the runs to move, and one of --before, --after, --top, --bottom or --to."))
    _move(api, runs, given, dry_run, as_json, quiet)


def _move(api: config.Api, runs: list[str], target: dict[str, Any], dry_run: bool, as_json: bool, quiet: bool) -> None:
    seen = [api.send("GET", api.in_project("runs", run)) for run in runs]
    found = [api.json(response) for response in seen]
    queues = {run["queue"] for run in found}
    if len(queues) > 1:
        raise CliError(
            _("the runs are in different queues: {queues}. Nothing was moved.", queues=clean(listed(sorted(queues))))
        )
    # By id: a newer run may take the name. If-Match: a run that someone changed since the GET is not moved.
    body = {"runs": [run["id"] for run in found], "dry_run": dry_run, **target}
    headers = {"If-Match": seen[0].headers["ETag"]} if len(seen) == 1 and not dry_run else {}
    queue = found[0]["queue"]
    try:
        moved = api.post(api.in_project("queues", queue, "move"), body, headers=headers)
    except ApiError as refused:
        if refused.status != 412:
            raise
        raise CliError(refused.message, _("To move it anyway, run the command again.")) from None
    _print_move(moved, queue, dry_run, as_json, quiet)


def _print_move(moved: dict[str, Any], queue: str, dry_run: bool, as_json: bool, quiet: bool) -> None:
    _print(moved, as_json, quiet)
    if not moved["changes"]:
        note(_("Nothing to move: already in this position."))
        return
    if not moved["exact"]:
        note(_("Moved to your nearest position: only managers move runs past those of other members."))
    if dry_run:
        note(_("Dry run: nothing was moved."))
    elif moved["move"] is not None:
        command = "dstackweb move --undo" + ("" if queue == "default" else f" --queue {clean(queue)}")
        note(_("Undo within {n} s: {command}", n=moved["undo_s"], command=command))


def _undo(api: config.Api, queue: str) -> dict[str, Any]:
    try:
        return api.post(api.in_project("queues", queue or "default", "undo"), {})
    except ApiError as refused:
        if queue or refused.status != 409:
            raise
        raise CliError(refused.message, _("For a move in another queue: dstackweb move --undo --queue NAME")) from None


def _print(moved: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """A line for each run moved; the last line has the effect on other runs."""
    if as_json:
        show_json(moved)
        return
    if quiet:
        show_ids(moved["changes"])
        return
    there = moved.get("queue")
    lines = [f"{clean(change['run'])}: {_change_text(change, there)}" for change in moved["changes"]]
    if lines and (slips := [_slip_text(change) for change in moved["slips"]]):
        more = (moved["slips_total"] or 0) - len(slips)
        if more > 0:
            slips.append(_n("{n:,} more run changes position", "{n:,} more runs change position", more))
        lines[-1] = _("; ").join([lines[-1], listed(slips)])
    for line in lines:
        echo(line)
    if there:
        _print_queue(there, moved["slips_total"])


def _print_queue(there: dict[str, Any], pushed: int | None) -> None:
    if there["reordered"]:
        note(_("Their order changes: ageing step or fair share differ there."))
    if pushed:
        note(_n("{n:,} run there moves back.", "{n:,} runs there move back.", pushed))
    for wait in there["waits"]:
        note(f"{clean(wait['run'])}: " + _("{sentence}.", sentence=clean(wait["reason_detail"] or wait["reason"])))
    if there["beside"] and (start := start_text(there["starts"])):
        name = clean(there["beside"])
        note(_("Expected start of {name}, which waits there now: {start}", name=name, start=start))


def _change_text(change: dict[str, Any], there: dict[str, Any] | None = None) -> str:
    parts = []
    before, after = change["position_before"], change["position_after"]
    if there:
        here = _("position {position}", position=before) if before else word("pending")
        place = clean(there["name"])
        if after is not None:
            place = _("position {position} in {queue}", position=after, queue=place)
        parts.append(f"{here} → {place}")
        if change["penalty_s"]:
            parts.append(_("fair share: {duration} behind", duration=duration_text(change["penalty_s"])))
        return listed(parts)
    if before is not None and after is not None and before != after:
        parts.append(_("position {before} → {after}", before=before, after=after))
    elif before is None and after is not None:
        parts.append(_("now at position {position}", position=after))
    before, now = change["priority_before"], change["priority_after"]
    if before != now:
        parts.append(_("priority {before} → {after}", before=before, after=now))
    return listed(parts) or (_("moved") if after is None else _("stays at position {position}", position=after))


def _slip_text(change: dict[str, Any]) -> str:
    values = {
        "user": clean(change["user"]),
        "run": clean(change["run"]),
        "before": change["position_before"],
        "after": change["position_after"],
        "priority": change["priority_after"],
    }
    if change["priority_before"] != change["priority_after"]:
        return _("{user}'s {run} {before} → {after} (priority {priority})", **values)
    return _("{user}'s {run} {before} → {after}", **values)
