"""`dstackweb queue --at`: a queue as it was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dstackweb.cli.output import (
    Column,
    ItemColumns,
    Note,
    Rows,
    UsageError,
    View,
    clean,
    clock_text,
    plural,
    show_ids,
    show_json,
    show_view,
)
from dstackweb.spec.units import duration_text, parse_duration

if TYPE_CHECKING:
    from dstackweb.cli.client import Api


def moment(text: str, now: datetime | None = None) -> datetime:
    """A moment in this machine's time zone, or one so long ago: `2026-11-26T14:00`, `14:00`, `-2h`."""
    now = now or datetime.now(UTC)
    try:
        if text.startswith("-"):
            return now - timedelta(seconds=parse_duration(text[1:]))
        if len(text) == len("14:00"):
            text = f"{now.astimezone():%Y-%m-%d}T{text}"
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        given = clean(text if len(text) <= 40 else f"{text[:40]}…")
        raise UsageError(f"--at takes a time such as 2026-11-26T14:00, 14:00 or -2h, not {given!r}.") from None


def show_past(api: Api, name: str, at: str, limit: int, as_json: bool, quiet: bool) -> None:
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
    states = [word for word in ("paused", "draining") if page[word]]
    counts = [plural(page["waiting"], "run") + " waited", f"{page['placed_total']} placed"]
    yield Note(f"{clean(page['name'])} at {at:%Y-%m-%d %H:%M}: {', '.join([*states, *counts])}.")
    if page["items"]:
        ago = {Column("WAITED", right=True): lambda run: _waited(run, at)}
        columns = list(COLUMNS.items())
        yield Rows.of(dict([*columns[:4], *ago.items(), *columns[4:]]), page["items"])
    if page["deleted"]:
        yield Note(f"{plural(page['deleted'], 'run')} of these deleted since.")
    if page["placed"]:
        yield ""
        yield Rows.of(PLACED_COLUMNS, page["placed"])
    if page["next"]:
        yield Note(f"Showing the first {len(page['items'])}; for more: --limit")


def _waited(run: dict[str, Any], at: datetime) -> str:
    return duration_text(max(0, int((at - datetime.fromisoformat(run["queued_at"])).total_seconds())))


def _next(run: dict[str, Any]) -> str:
    when = f" {clock_text(run['then_at'])}" if run["then_at"] else ""
    return f"{run['then_detail']}{when}"


COLUMNS: ItemColumns = {
    Column("#", right=True): itemgetter("position"),
    Column("NAME"): lambda run: run["name"] or "(deleted)",
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
