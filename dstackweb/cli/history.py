"""`dstackweb history`: how long runs waited, by day, priority and queue."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.output import Column, Json, bar, note, show_json, show_table
from dstackweb.spec.units import duration_text

NUMBERS = [
    Column("STARTED", right=True),
    Column("MEDIAN WAIT", right=True),
    Column("P90", right=True),
    Column("LONGEST", right=True),
    Column("WAITING", right=True),
]


def history(
    queue: Annotated[str, typer.Argument(metavar="[QUEUE]", help="One queue; the whole project if empty.")] = "",
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
    typer.echo()
    bands = [(f"{band['low']}–{band['high']}", *_numbers(band["total"])) for band in reversed(past["bands"])]
    show_table([Column("PRIORITY"), *NUMBERS], bands)
    if len(past.get("queues", ())) > 1:
        typer.echo()
        show_table([Column("QUEUE"), *NUMBERS], [(each["queue"], *_numbers(each["total"])) for each in past["queues"]])
    note(f"Time zone {past['zone']}. Wait: from entering the queue to the start. WAITING: mean and maximum.")


def _days(past: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    from datetime import datetime

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
