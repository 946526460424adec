"""`dstackweb history`: how long runs waited, by the day and by priority."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.output import Column, note, show_json, show_table

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

BAR = 16
EIGHTHS = " ▏▎▍▌▋▊▉█"
NUMBERS = [
    Column("STARTED", right=True),
    Column("MEDIAN WAIT", right=True),
    Column("9 OF 10", right=True),
    Column("LONGEST", right=True),
    Column("IN LINE", right=True),
]


def history(
    queue: Annotated[str, typer.Argument(metavar="[QUEUE]", help="One queue; without it all of the project.")] = "",
    days: Annotated[int, typer.Option(min=1, max=90, help="How far back.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="As the API gives it, for scripts.")] = False,
) -> None:
    """Show how long runs waited and how many stood in line, by the day and by priority."""
    api = _connect()
    path = api.in_project("queues", queue, "history") if queue else api.in_project("history")
    told = api.get(path, days=days, step="day", tz=local_zone())
    if as_json:
        show_json(told)
        return
    if not told["total"]["placed"] and not told["total"]["length_max"]:
        note(f"Nothing waited in {queue or 'any queue'} in the last {days} days.")
        return
    show_table([Column("DAY"), *NUMBERS, Column("")], list(_days(told)))
    typer.echo()
    bands = [(f"{band['low']}–{band['high']}", *_numbers(band["total"])) for band in reversed(told["bands"])]
    show_table([Column("PRIORITY"), *NUMBERS], bands)
    if len(told.get("queues", ())) > 1:
        typer.echo()
        show_table([Column("QUEUE"), *NUMBERS], [(each["queue"], *_numbers(each["total"])) for each in told["queues"]])
    note(f"Days of {told['zone']}; waits from entering the queue to the start; in line: mean, and the most.")


def _connect() -> Api:
    from dstackweb.cli.client import Api

    return Api(config.load())


def _days(told: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    from datetime import datetime

    columns, zone = told["all"], _zone(told["zone"])
    longest = max((wait for wait in columns["wait_median_s"] if wait is not None), default=0)
    for index, at in enumerate(told["times"]):
        day = {name: values[index] for name, values in columns.items()}
        date = datetime.fromisoformat(at).astimezone(zone)
        yield f"{date:%a %d %b}", *_numbers(day), bar(day["wait_median_s"], longest)


def _numbers(span: dict[str, Any]) -> Sequence[object]:
    waits = (wait_text(span[name]) for name in ("wait_median_s", "wait_p90_s", "wait_max_s"))
    line = "" if span["length"] is None else f"{span['length']:g} (≤{span['length_max']})"
    return (span["placed"], *waits, line)


def wait_text(seconds: int | None) -> str:
    """A wait in its two largest units: `40s`, `12m`, `3h05`, `2d 4h`. Nothing for none."""
    if seconds is None:
        return ""
    if seconds < 3600:
        return f"{seconds}s" if seconds < 60 else f"{seconds // 60}m"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}"
    return f"{seconds // 86400}d {seconds % 86400 // 3600}h"


def bar(value: float | None, most: float, cells: int = BAR) -> str:
    """A bar of so many cells for `most`, to an eighth of a cell; nothing for nothing."""
    if not value or not most:
        return ""
    eighths = max(1, round(8 * cells * value / most))
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def local_zone() -> str:
    """The IANA name of this machine's zone, as TZ or /etc/localtime tell it; UTC where neither does."""
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
