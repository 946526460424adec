"""What was: `dstackweb history` (waits), `queue --at` (a queue as it was) and `usage` (GPU time and cost)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import queue_names
from dstackweb.cli.language import N_, _, _n, _p, clock_text, duration_text, listed
from dstackweb.cli.options import Json, flag, one_form
from dstackweb.cli.output import UsageError, clean, show_ids, show_json
from dstackweb.cli.tables import Column, ItemColumns, Note, Rows, View, bar, show_csv, show_found, show_view
from dstackweb.spec.units import parse_duration, price_text

WEEKDAYS = (N_("Mon"), N_("Tue"), N_("Wed"), N_("Thu"), N_("Fri"), N_("Sat"), N_("Sun"))
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
        typer.Argument(metavar="QUEUE", help=_("One queue; the whole project if empty."), autocompletion=queue_names),
    ] = "",
    days: Annotated[int, typer.Option(metavar="N", min=1, max=90, help=_("Number of days."))] = 7,
    as_json: Json = False,
) -> None:
    """Show how long runs waited and how many were waiting, by day and by priority."""
    api = config.connect()
    path = api.in_project("queues", queue, "history") if queue else api.in_project("history")
    past = api.get(path, days=days, step="day", tz=local_zone())
    show_found(past, _waits(past, queue, days), as_json)


def _waits(past: dict[str, Any], queue: str, days: int) -> View:
    if not past["total"]["placed"] and not past["total"]["length_max"]:
        yield Note(
            _n(
                "No runs waited in {queue} in the last {n} day.",
                "No runs waited in {queue} in the last {n} days.",
                days,
                queue=queue,
            )
            if queue
            else _n(
                "No runs waited in any queue in the last {n} day.",
                "No runs waited in any queue in the last {n} days.",
                days,
            )
        )
        return
    yield Rows([Column("DAY"), *NUMBERS, Column()], list(_days(past)))
    yield ""
    bands = [(f"{band['low']}–{band['high']}", *_numbers(band["total"])) for band in reversed(past["bands"])]
    yield Rows([Column("PRIORITY"), *NUMBERS], bands)
    if len(past.get("queues", ())) > 1:
        yield ""
        yield Rows([Column("QUEUE"), *NUMBERS], [(each["queue"], *_numbers(each["total"])) for each in past["queues"]])
    yield Note(
        _("Time zone {zone}. Wait: from entering the queue to the start. WAITING: mean and maximum.", zone=past["zone"])
    )


def _days(past: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    columns, zone = past["all"], _zone(past["zone"])
    longest = max((wait for wait in columns["wait_median_s"] if wait is not None), default=0)
    for index, at in enumerate(past["times"]):
        day = {name: values[index] for name, values in columns.items()}
        date = datetime.fromisoformat(at).astimezone(zone)
        yield (
            _("{weekday} {date:%d %b}", weekday=_(WEEKDAYS[date.weekday()]), date=date),
            *_numbers(day),
            bar(day["wait_median_s"], longest),
        )


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


def moment(text: str, now: datetime | None = None) -> datetime:
    """A moment in this machine's time zone, or one so long ago: `2026-11-26T14:00`, `14:00`, `-2h`."""
    now = now or datetime.now(UTC)
    try:
        if text.startswith("-"):
            return now - timedelta(seconds=parse_duration(text[1:]))
        day = f"{now.astimezone():%Y-%m-%d}T" if len(text) == len("14:00") else ""
        return datetime.fromisoformat(day + text).astimezone()
    except (ValueError, OverflowError):
        given = clean(text if len(text) <= 40 else f"{text[:40]}…")
        raise UsageError(
            _("--at takes a time such as 2026-11-26T14:00, 14:00 or -2h, not {given!r}.", given=given)
        ) from None


def show_past(api: config.Api, name: str, at: str, limit: int, as_json: bool, quiet: bool) -> None:
    """Print a queue as it was; `quiet`: the ids of the runs that waited, without deleted ones."""
    page = api.get(api.in_project("queues", name, "at"), t=moment(at).isoformat(), limit=limit)
    if as_json:
        show_json(page)
    elif quiet:
        show_ids(run for run in page["items"] if run["id"])
    else:
        show_view(past_view(page))


def past_view(page: dict[str, Any]) -> View:
    at = datetime.fromisoformat(page["at"]).astimezone()
    states = [text for key, text in (("paused", _("paused")), ("draining", _p("queue", "draining"))) if page[key]]
    waited = _n("{n:,} run waited", "{n:,} runs waited", page["waiting"])
    counts = listed([*states, waited, _("{n} placed", n=page["placed_total"])])
    yield Note(_("{name} at {at:%Y-%m-%d %H:%M}: {counts}.", name=clean(page["name"]), at=at, counts=counts))
    if page["items"]:
        ago = {Column("WAITED", right=True): lambda run: _waited(run, at)}
        columns = list(COLUMNS.items())
        yield Rows.of(dict([*columns[:4], *ago.items(), *columns[4:]]), page["items"])
    if page["deleted"]:
        yield Note(_n("{n:,} run of these deleted since.", "{n:,} runs of these deleted since.", page["deleted"]))
    if page["placed"]:
        yield ""
        yield Rows.of(PLACED_COLUMNS, page["placed"])
    if page["next"]:
        yield Note(_("Showing the first {n}; for more: --limit", n=len(page["items"])))


def _waited(run: dict[str, Any], at: datetime) -> str:
    return duration_text(max(0, int((at - datetime.fromisoformat(run["queued_at"])).total_seconds())))


def _next(run: dict[str, Any]) -> str:
    when = f" {clock_text(run['then_at'])}" if run["then_at"] else ""
    return f"{run['then_detail']}{when}"


COLUMNS: ItemColumns = {
    Column("#", right=True): itemgetter("position"),
    Column("NAME"): lambda run: run["name"] or _("(deleted)"),
    Column("PRIO", right=True): itemgetter("priority"),
    Column("USER"): lambda run: run["user"] or "",
    Column("THEN"): _next,
    Column("WHY", wide=True): lambda run: run["reason_detail"] or run["reason"] or "",
}
"""Of runs that waited, the items of `GET …/queues/NAME/at`."""

PLACED_COLUMNS: ItemColumns = {
    Column("PLACED"): itemgetter("name"),
    Column("USER"): itemgetter("user"),
    Column("WHERE"): itemgetter("where"),
    Column("SINCE", right=True): lambda run: clock_text(run["placed_at"]),
    Column("UNTIL", right=True): lambda run: clock_text(run["until"]) if run["until"] else "",
}
"""Of runs that were placed."""


BY = {"member": Column("MEMBER"), "queue": Column("QUEUE"), "project": Column("PROJECT")}
USED = [
    Column("GPU-HOURS", right=True),
    Column("IDLE", right=True),
    Column("CPU-HOURS", right=True),
    Column("USD", right=True),
    Column("RUNS", right=True),
]


def usage(
    days: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=366, help=_("Number of days (UTC), including today. Default: 30.")),
    ] = None,
    month: Annotated[str, typer.Option(metavar="YYYY-MM", help=_("A month instead."))] = "",
    by: Annotated[
        Literal["member", "queue", "project"] | None,
        typer.Option(metavar="member|queue|project", help=_("What is added up. Default: member; with --all, project.")),
    ] = None,
    whole: Annotated[bool, flag("--all", help=_("All projects, for deployment admins."))] = False,
    as_json: Json = False,
    as_csv: Annotated[bool, flag("--csv", help=_("Print a row per month as CSV."), callback=one_form)] = False,
) -> None:
    """Show GPU-hours, idle share and cost by member, queue or project."""
    if month and not re.fullmatch(r"\d{4}-\d\d", month):
        raise UsageError(_("{month} is not a month such as 2026-11.", month=month))
    if month and days is not None:
        raise UsageError(_("{one} can't be combined with {other}.", one="--days", other="--month"))
    api = config.connect()
    added_up_by = by or ("project" if whole else "member")
    asked = {"days": days or 30, "month": month, "by": added_up_by}
    if as_csv:
        show_csv(api, api.path("usage", "export") if whole else api.in_project("exports", "usage"), **asked)
        return
    found = api.get(api.path("usage") if whole else api.in_project("usage"), **asked)
    show_found(found, _usage(found, BY[added_up_by]), as_json)


def _usage(found: dict[str, Any], by: Column) -> View:
    if found["items"]:
        hours = "gpu_hours" if found["total"]["gpu_hours"] else "cpu_hours"
        most = max(item[hours] for item in found["items"])
        rows = [(item["name"], *_used(item), bar(item[hours], most)) for item in found["items"]]
        yield Rows([by, *USED, Column()], [*rows, (_("all"), *_used(found["total"]), "")])
    yield Note(_usage_note(found))


def _used(used: dict[str, Any]) -> tuple[object, ...]:
    return (
        f"{used['gpu_hours']:,.1f}",
        "" if used["idle_share"] is None else f"{used['idle_share']:.0%}",
        f"{used['cpu_hours']:,.1f}",
        price_text(round(used["usd"], 2)) if used["usd"] else "",
        used["done"] + used["failed"] + used["terminated"],
    )


def _usage_note(found: dict[str, Any]) -> str:
    span = {"first": found["first"], "last": found["last"]}
    if not found["items"]:
        return _("No usage from {first} to {last} (UTC).", **span)
    total = found["total"]
    if total["gpu_hours"]:
        return _(
            "{first} to {last} (UTC). IDLE: below 5 % utilization, of the GPU time that samples cover "
            "({share:.0%}). RUNS: ended.",
            **span,
            share=min(1, total["measured_gpu_hours"] / total["gpu_hours"]),
        )
    return _(
        "{first} to {last} (UTC). IDLE: below 5 % utilization, of the GPU time that samples cover. RUNS: ended.",
        **span,
    )
