"""`dstackweb queue`, `move` and `history`: a queue in order, its settings, moves, and past waits."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import queue_names, run_names
from dstackweb.cli.output import (
    ApiError,
    CliError,
    Column,
    ItemColumns,
    Json,
    Note,
    Quiet,
    Rows,
    UsageError,
    View,
    Watch,
    age_text,
    bar,
    clean,
    echo,
    note,
    plural,
    show_ids,
    show_json,
    show_table,
    show_view,
    start_text,
    watch_view,
)
from dstackweb.cli.queue_past import show_past
from dstackweb.spec.units import duration_text

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

DIGITS = 12
"""The most digits of a number that is sent; the server knows its own limits."""
LIMITS = {
    "max_running": ("run", "at once"),
    "max_gpus": ("GPU", "at once"),
    "max_running_per_user": ("run", "at once per member"),
    "max_gpus_per_user": ("GPU", "at once per member"),
}


def queue(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The queue.", autocompletion=queue_names)] = "default",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of runs.")] = 20,
    follow: Watch = False,
    as_json: Json = False,
    quiet: Quiet = False,
    at: Annotated[
        str, typer.Option(metavar="TIME", help="As it was: 2026-11-26T14:00, 14:00 or -2h, up to 30 days ago.")
    ] = "",
    every: Annotated[bool, typer.Option("--list", "-l", help="List the project's queues.")] = False,
    create: Annotated[bool, typer.Option("--create", help="Create the queue.")] = False,
    pause: Annotated[bool | None, typer.Option("--pause/--resume", help="Pause or resume scheduling.")] = None,
    drain: Annotated[bool | None, typer.Option("--drain/--undrain", help="Refuse or accept new runs.")] = None,
    ageing: Annotated[
        str | None, typer.Option(metavar="MIN|strict", help="Minutes of waiting for +1 priority; strict for none.")
    ] = None,
    fair_share: Annotated[
        str | None,
        typer.Option(metavar="MIN|off", help="Maximum penalty in minutes for members above the median."),
    ] = None,
    half_life: Annotated[
        int | None, typer.Option(metavar="DAYS", min=1, max=90, help="Days after which past usage counts half.")
    ] = None,
    max_running: Annotated[str | None, typer.Option(metavar="N|none", help="Maximum runs at once.")] = None,
    max_gpus: Annotated[str | None, typer.Option(metavar="N|none", help="Maximum GPUs at once.")] = None,
    max_running_per_user: Annotated[
        str | None, typer.Option(metavar="N|none", help="Maximum runs at once per member.")
    ] = None,
    max_gpus_per_user: Annotated[
        str | None, typer.Option(metavar="N|none", help="Maximum GPUs at once per member.")
    ] = None,
    preempt_points: Annotated[
        str | None,
        typer.Option(metavar="N|off", help="Displace preemptible runs whose priority is at least N lower; off: never."),
    ] = None,
) -> None:
    """Show a queue in its order and why each run waits. Managers change its settings with the options."""
    limits = {
        "max_running": max_running,
        "max_gpus": max_gpus,
        "max_running_per_user": max_running_per_user,
        "max_gpus_per_user": max_gpus_per_user,
    }
    settings: dict[str, Any] = {key: _number(key, text, "none") for key, text in limits.items() if text is not None}
    if ageing is not None:
        settings["ageing_minutes"] = _number("ageing", ageing, "strict")
    switches = {"fair_share": ("fair_share_minutes", fair_share), "preempt_points": ("preempt_points", preempt_points)}
    settings |= {key: _number(option, text, "off") for option, (key, text) in switches.items() if text is not None}
    if half_life is not None:
        settings["fair_share_half_life_days"] = half_life
    settings |= {key: on for key, on in (("paused", pause), ("draining", drain)) if on is not None}
    if every and (create or settings):
        raise UsageError("--list changes nothing. To change a queue's settings, leave --list out.")
    if at and (every or create or settings or follow):
        raise UsageError("--at shows the past of a queue, and takes only --limit, --json and --quiet.")
    api = config.connect()
    if every:
        _show(api, lambda: api.get(api.in_project("queues")), _queues, follow, as_json, quiet, key="name")
        return
    if at:
        show_past(api, name, at, limit, as_json, quiet)
        return
    if create:
        api.send("POST", api.in_project("queues"), json={"name": name, **settings})
    elif settings:
        api.send("PATCH", api.in_project("queues", name), json=settings)
    _show(api, lambda: api.get(api.in_project("queues", name), limit=limit), _waiting, follow, as_json, quiet)


def _number(option: str, text: str, nothing: str) -> int | None:
    if text == nothing:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        given = text if len(text) <= DIGITS else f"{text[:DIGITS]}…"
        raise UsageError(f"--{option.replace('_', '-')} takes a whole number or {nothing}, not {clean(given)!r}.")
    return int(text)


def _show(
    api: Api,
    fetch: Callable[[], dict[str, Any]],
    view: Callable[[dict[str, Any]], View],
    follow: bool,
    as_json: bool,
    quiet: bool,
    key: str = "id",
) -> None:
    page = fetch()
    if as_json:
        show_json(page)
    elif quiet:
        show_ids(page["items"], key)
    elif follow:
        watch_view(api, page, fetch, view)
    else:
        show_view(view(page))


def _queues(page: dict[str, Any]) -> View:
    yield Rows.of(QUEUE_COLUMNS, page["items"])


def _placed(row: dict[str, Any]) -> int:
    return sum(int(row[status]) for status in ("provisioning", "running", "terminating"))


def settings_text(row: dict[str, Any]) -> list[str]:
    """A queue's settings in words, those that stop runs first."""
    parts = []
    if row["paused"]:
        parts.append("paused: no run starts until a manager resumes it")
    if row["draining"]:
        parts.append("draining: new runs are refused, waiting runs still start")
    parts += [f"at most {plural(row[key], unit)} {of}" for key, (unit, of) in LIMITS.items() if row[key] is not None]
    if (points := row.get("preempt_points")) is not None:
        parts.append(f"displaces preemptible runs whose priority is at least {points} lower")
    minutes = row["ageing_minutes"]
    parts.append("strict priority" if minutes is None else f"+1 priority per {minutes} min waiting")
    if row.get("fair_share_minutes"):
        most, days = duration_text(60 * row["fair_share_minutes"]), plural(row["fair_share_half_life_days"], "day")
        parts.append(f"fair share: up to {most} behind, half-life {days}")
    return parts


def _waiting(page: dict[str, Any]) -> View:
    yield Note(f"{clean(page['name'])}: {'; '.join(settings_text(page))}.")
    if not page["items"]:
        yield Note(f"No runs wait in {clean(page['name'])}.")
        return
    yield Rows.of(RUN_COLUMNS, page["items"])
    if page.get("shares"):
        yield ""
        yield Rows.of(SHARE_COLUMNS, page["shares"])
    if page["next"]:
        yield Note(f"Showing the first {len(page['items'])}; for more: --limit")


def _why(run: dict[str, Any]) -> str:
    parts = [str(run["reason_detail"] or run["reason"])]
    if run.get("penalty_s"):
        parts.append(f"fair share: {duration_text(run['penalty_s'])} behind")
    if run["moved_by"]:
        parts.append(f"moved by {run['moved_by']} {age_text(run['moved_at'])} ago")
    return parts[0] if len(parts) == 1 else "; ".join([parts[0].rstrip("."), *parts[1:]])


RUN_COLUMNS: ItemColumns = {
    Column("#", right=True): itemgetter("position"),
    Column("NAME"): itemgetter("name"),
    Column("PRIO", right=True): itemgetter("priority"),
    Column("USER"): itemgetter("user"),
    Column("WAITS", right=True): lambda run: age_text(run["submitted_at"]),
    Column("STARTS"): lambda run: start_text(run.get("starts")),
    Column("WHY", wide=True): _why,
}
"""Of waiting runs, the items of `GET …/queues/NAME`."""

SHARE_COLUMNS: ItemColumns = {
    Column("FAIR SHARE"): itemgetter("user"),
    Column("GPU-H", right=True): itemgetter("gpu_hours"),
    Column("USED", right=True): itemgetter("used_gpu_hours"),
    Column("HELD", right=True): itemgetter("held_gpus"),
    Column("QUEUED", right=True): itemgetter("queued_gpus"),
    Column("BEHIND", right=True): lambda share: duration_text(share["penalty_s"]) if share["penalty_s"] else "",
}
"""Of members, the `shares` of `GET …/queues/NAME`."""

QUEUE_COLUMNS: ItemColumns = {
    Column("NAME"): itemgetter("name"),
    Column("WAIT", right=True): itemgetter("submitted"),
    Column("PENDING", right=True): itemgetter("pending"),
    Column("PLACED", right=True): _placed,
    Column("SETTINGS", wide=True): lambda row: "; ".join(settings_text(row)),
}


def move(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Names or ids of runs.", autocompletion=run_names)
    ] = None,
    before: Annotated[
        str, typer.Option(metavar="RUN", help="Directly before this run.", autocompletion=run_names)
    ] = "",
    after: Annotated[str, typer.Option(metavar="RUN", help="Directly after this run.", autocompletion=run_names)] = "",
    top: Annotated[bool, typer.Option("--top", help="To the start of the queue.")] = False,
    bottom: Annotated[bool, typer.Option("--bottom", help="To the end of the queue.")] = False,
    to: Annotated[str, typer.Option(metavar="QUEUE", help="To another queue.", autocompletion=queue_names)] = "",
    member: Annotated[str, typer.Option(metavar="NAME", help="With --to: all waiting runs of this member.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the effect without moving.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Undo your latest move, within ten seconds.")] = False,
    queue: Annotated[
        str,
        typer.Option(help="Queue of the move to undo, or of --member; default if empty.", autocompletion=queue_names),
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
            raise UsageError("--undo takes no runs and no position: it undoes your latest move.")
        _print(_undo(api, queue), as_json, quiet)
        note("Undone.")
        return
    if member:
        if runs or list(given) != ["queue"]:
            raise UsageError("--member moves all waiting runs of a member: name no runs, and the new queue with --to.")
        body = {"member": member, "dry_run": dry_run, **given}
        _print_move(api.post(api.in_project("queues", queue or "default", "move"), body), "", dry_run, as_json, quiet)
        return
    if queue:
        raise UsageError("--queue is only for --undo and --member. To move runs to another queue: --to.")
    if not runs or len(given) != 1:
        raise UsageError("name the runs to move, and one of --before, --after, --top, --bottom or --to.")
    _move(api, runs, given, dry_run, as_json, quiet)


def _move(api: Api, runs: list[str], target: dict[str, Any], dry_run: bool, as_json: bool, quiet: bool) -> None:
    seen = [api.send("GET", api.in_project("runs", run)) for run in runs]
    found = [api.json(response) for response in seen]
    queues = {run["queue"] for run in found}
    if len(queues) > 1:
        raise CliError(f"the runs are in different queues: {clean(', '.join(sorted(queues)))}. Nothing was moved.")
    # By id: a newer run may take the name. If-Match: a run that someone changed since the GET is not moved.
    body = {"runs": [run["id"] for run in found], "dry_run": dry_run, **target}
    headers = {"If-Match": seen[0].headers["ETag"]} if len(seen) == 1 and not dry_run else {}
    queue = found[0]["queue"]
    try:
        moved = api.post(api.in_project("queues", queue, "move"), body, headers=headers)
    except ApiError as refused:
        if refused.status != 412:
            raise
        raise CliError(refused.message, "To move it anyway, run the command again.") from None
    _print_move(moved, queue, dry_run, as_json, quiet)


def _print_move(moved: dict[str, Any], queue: str, dry_run: bool, as_json: bool, quiet: bool) -> None:
    _print(moved, as_json, quiet)
    if not moved["changes"]:
        note("Nothing to move: already in this position.")
        return
    if not moved["exact"]:
        note("Moved to your nearest position: only managers move runs past those of other members.")
    if dry_run:
        note("Dry run: nothing was moved.")
    elif moved["move"] is not None:
        of_queue = "" if queue == "default" else f" --queue {clean(queue)}"
        note(f"Undo within {moved['undo_s']} s: dstackweb move --undo{of_queue}")


def _undo(api: Api, queue: str) -> dict[str, Any]:
    try:
        undone: dict[str, Any] = api.post(api.in_project("queues", queue or "default", "undo"), {})
    except ApiError as refused:
        if queue or refused.status != 409:
            raise
        raise CliError(refused.message, "For a move in another queue: dstackweb move --undo --queue NAME") from None
    return undone


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
        lines[-1] += "; " + ", ".join([*slips, *([f"{more} more runs change position"] if more > 0 else [])])
    for line in lines:
        echo(line)
    if there:
        _print_queue(there, moved["slips_total"])


def _print_queue(there: dict[str, Any], pushed: int | None) -> None:
    """What runs find in another queue."""
    if there["reordered"]:
        note("Their order changes: ageing step or fair share differ there.")
    if pushed:
        note(f"{plural(pushed, 'run')} there {'moves' if pushed == 1 else 'move'} back.")
    for wait in there["waits"]:
        note(f"{clean(wait['run'])}: {clean(wait['reason_detail'] or wait['reason'])}.")
    if there["beside"] and (start := start_text(there["starts"])):
        note(f"Expected start of {clean(there['beside'])}, which waits there now: {start}")


def _change_text(change: dict[str, Any], there: dict[str, Any] | None = None) -> str:
    parts = []
    before, after = change["position_before"], change["position_after"]
    if there:
        place = "" if after is None else f"position {after} in "
        parts.append(f"{f'position {before}' if before else 'pending'} → {place}{clean(there['name'])}")
        if change["penalty_s"]:
            parts.append(f"fair share: {duration_text(change['penalty_s'])} behind")
        return ", ".join(parts)
    if before is not None and after is not None and before != after:
        parts.append(f"position {before} → {after}")
    elif before is None and after is not None:
        parts.append(f"now at position {after}")
    if change["priority_before"] != change["priority_after"]:
        parts.append(f"priority {change['priority_before']} → {change['priority_after']}")
    return ", ".join(parts) or ("moved" if after is None else f"stays at position {after}")


def _slip_text(change: dict[str, Any]) -> str:
    before, after = change["position_before"], change["position_after"]
    text = f"{clean(change['user'])}'s {clean(change['run'])} {before} → {after}"
    if change["priority_before"] != change["priority_after"]:
        text += f" (priority {change['priority_after']})"
    return text


NUMBERS = [
    Column("STARTED", right=True),
    Column("MEDIAN WAIT", right=True),
    Column("P90", right=True),
    Column("LONGEST", right=True),
    Column("WAITING", right=True),
]


def history(
    queue: Annotated[
        str,
        typer.Argument(metavar="QUEUE", help="One queue; the whole project if empty.", autocompletion=queue_names),
    ] = "",
    days: Annotated[int, typer.Option(min=1, max=90, help="Number of days.")] = 7,
    as_json: Json = False,
) -> None:
    """Show how long runs waited and how many were waiting, by day and by priority."""
    api = config.connect()
    path = api.in_project("queues", queue, "history") if queue else api.in_project("history")
    past = api.get(path, days=days, step="day", tz=local_zone())
    if as_json:
        show_json(past)
        return
    if not past["total"]["placed"] and not past["total"]["length_max"]:
        note(f"No runs waited in {queue or 'any queue'} in the last {days} days.")
        return
    show_table([Column("DAY"), *NUMBERS, Column("")], list(_days(past)))
    echo()
    bands = [(f"{band['low']}–{band['high']}", *_numbers(band["total"])) for band in reversed(past["bands"])]
    show_table([Column("PRIORITY"), *NUMBERS], bands)
    if len(past.get("queues", ())) > 1:
        echo()
        show_table([Column("QUEUE"), *NUMBERS], [(each["queue"], *_numbers(each["total"])) for each in past["queues"]])
    note(f"Time zone {past['zone']}. Wait: from entering the queue to the start. WAITING: mean and maximum.")


def _days(past: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    columns, zone = past["all"], _zone(past["zone"])
    longest = max((wait for wait in columns["wait_median_s"] if wait is not None), default=0)
    for index, at in enumerate(past["times"]):
        day = {name: values[index] for name, values in columns.items()}
        date = datetime.fromisoformat(at).astimezone(zone)
        yield f"{date:%a %d %b}", *_numbers(day), bar(day["wait_median_s"], longest)


def _numbers(span: dict[str, Any]) -> Sequence[object]:
    seconds = (span[name] for name in ("wait_median_s", "wait_p90_s", "wait_max_s"))
    waits = ("" if wait is None else duration_text(wait) for wait in seconds)
    waiting = "" if span["length"] is None else f"{span['length']:g} (≤{span['length_max']})"
    return (span["placed"], *waits, waiting)


def local_zone() -> str:
    """The IANA name of this machine's time zone, from TZ or /etc/localtime; UTC if neither has one."""
    name = os.environ.get("TZ", "").removeprefix(":")
    if not name:
        found = re.search(r"zoneinfo/(?:posix/|right/)?(.+)$", str(Path("/etc/localtime").resolve()))
        name = found[1] if found else ""
    return name if _known(name) else "UTC"


def _known(name: str) -> bool:
    try:
        return bool(name) and bool(_zone(name))
    except (ValueError, KeyError, OSError):
        return False


def _zone(name: str) -> Any:
    from zoneinfo import ZoneInfo

    return ZoneInfo(name)
