"""`dstackweb queue --at`: a queue as it was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dstackweb.cli.language import _, _n, _p
from dstackweb.cli.output import UsageError, clean, show_ids, show_json
from dstackweb.cli.tables import Column, ItemColumns, Note, Rows, View, show_view
from dstackweb.cli.values import clock_text, duration_text, listed
from dstackweb.spec.units import parse_duration

if TYPE_CHECKING:
    from dstackweb.cli.client import Api


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
