"""`dstackweb show` and `diff`: all about one run, and two runs side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from operator import itemgetter
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import run_names
from dstackweb.cli.language import N_, _, _n, clock_text, duration_text, start_text, word
from dstackweb.cli.options import Json, Quiet, RunName, Watch, flag
from dstackweb.cli.output import ENDED, Painted, clean, paint, show_answer, show_ids, show_json
from dstackweb.cli.plan import settings_rows
from dstackweb.cli.runs import status_text
from dstackweb.cli.tables import Column, ItemColumns, Note, Rows, View, show_view, watch_view
from dstackweb.spec.units import price_text

EVENTS_SHOWN = 12
SIGNS = {"both": " ", "left": "-", "right": "+"}
COLOURS = {"left": "31", "right": "32"}
TIMES = {"waited_s": N_("waited"), "starting_s": N_("started in"), "ran_s": N_("ran"), "total_s": N_("total")}
OUTCOME = {
    "status": N_("status"),
    "exit_code": N_("exit code"),
    "status_message": N_("message"),
    "attempt": N_("attempt"),
    "place": N_("place"),
    "cost": N_("cost"),
}
FACTS = Column(wide=True)


def show(run: RunName, follow: Watch = False, as_json: Json = False, quiet: Quiet = False) -> None:
    """Show all about one run: its status and why, times, nodes, settings and newest events."""
    api = config.connect()
    found = api.get(api.in_project("runs", run))
    path = api.in_project("runs", found["id"])  # by id: a newer run may take the name
    if as_json or quiet:
        show_answer(found, "", as_json, quiet)
    elif follow:
        watch_view(api, found, lambda: api.get(path), view_of, lambda run: run["status"] in ENDED)
    else:
        show_view(view_of(found))


def view_of(run: dict[str, Any]) -> View:
    """A run, an answer of the API, from its status to its events."""
    yield status_text(run)
    yield Rows([Column(), FACTS], list(_facts(run)))
    if run["jobs"]:
        yield ""
        yield Rows.of(NODES, run["jobs"])
    yield ""
    yield Rows([Column("SETTING"), Column("VALUE", wide=True), Column("FROM")], settings_rows(run, defaults=False))
    if run["events"]:
        yield ""
        events = run["events"][-EVENTS_SHOWN:]
        yield Rows([Column("TIME"), Column("EVENT", wide=True), Column("BY")], [_event(run, one) for one in events])
        if len(run["events"]) > EVENTS_SHOWN or run["events_next"]:
            yield Note(_("The newest {n} events. All: --json", n=EVENTS_SHOWN))


def _facts(run: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield "id", run["id"]
    yield _("user"), run["user"]
    yield _("queue"), _queue(run)
    yield _("times"), _times(run)
    if share := (run.get("factors") or {}).get("penalty_detail"):
        yield _("fair share"), share
    if starts := start_text(run.get("starts")):
        yield _("starts"), starts
    if run["max_duration_s"]:
        yield _("max duration"), duration_text(run["max_duration_s"])
    yield from _service_facts(run.get("service"))
    if run["cost"]:
        yield _("cost"), price_text(round(run["cost"], 2))
    for one in run["after"]:
        values = {"run": one["run"], "on": word(one["on"]), "outcome": word(one["outcome"])}
        yield _("after"), _("{run} ({on}): {outcome}", **values)


def _service_facts(service: dict[str, Any] | None) -> Iterator[tuple[str, object]]:
    if service is None:
        return
    health = service["health"]
    values = {"state": word(health["state"]), "since": clock_text(health["since"]), "detail": health["detail"]}
    yield _("url"), service["url"]
    if health["detail"]:
        yield _("health"), _("{state} since {since}; last check: {detail}", **values)
    else:
        yield _("health"), _("{state} since {since}", **values)
    if service["used_at"]:
        yield _("last request"), clock_text(service["used_at"])


def _queue(run: dict[str, Any]) -> str:
    values = {"queue": run["queue"], "priority": run["priority"], "position": run["position"]}
    if run["position"]:
        return _("{queue}, priority {priority}, position {position}", **values)
    return _("{queue}, priority {priority}", **values)


def _times(run: dict[str, Any]) -> str:
    submitted = clock_text(run["submitted_at"])
    if not run["started_at"]:
        return _("submitted {submitted}", submitted=submitted)
    until = datetime.fromisoformat(run["ended_at"]) if run["ended_at"] else datetime.now(UTC)
    took = duration_text((until - datetime.fromisoformat(run["started_at"])).total_seconds())
    values = {"submitted": submitted, "started": clock_text(run["started_at"]), "duration": took}
    if run["ended_at"]:
        return _("submitted {submitted}, started {started}, ran {duration}", **values)
    return _("submitted {submitted}, started {started}, running for {duration}", **values)


NODES: ItemColumns = {
    Column("ATTEMPT", right=True): itemgetter("attempt"),
    Column("NODE", right=True): itemgetter("node"),
    Column("STATUS"): lambda job: word(job["status"]),
    Column("PLACE", wide=True): lambda job: (
        job["host"] or " ".join(filter(None, (job["backend"], job["region"], job["instance_type"])))
    ),
    Column("GPUS", right=True): lambda job: len(job["gpus"]) or None,
    Column("EXIT", right=True): itemgetter("exit_code"),
    Column("MESSAGE", wide=True): lambda job: " ".join(
        filter(None, (job["message"], (job.get("accounting") or {}).get("detail")))
    ),
}
"""Of the `jobs` of a run."""


def _event(run: dict[str, Any], event: dict[str, Any]) -> tuple[object, ...]:
    detail = event["detail"]
    if event["node"] is not None and run["spec"]["nodes"] > 1:
        detail = _("node {node}: {detail}", node=event["node"], detail=detail)
    return clock_text(event["at"]), detail, event["actor"]


def diff(
    run: RunName,
    other: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help=_("The run to compare with; if empty, the one before of the same name."),
            autocompletion=run_names,
        ),
    ] = "",
    everything: Annotated[bool, flag("--all", "-a", help=_("Equal settings too."))] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two runs: settings that differ, how long each part took, and how they ended.

    Lines that only the first run has begin with -, those of the second with +.
    """
    api = config.connect()
    found = api.get(api.in_project("runs", run, "compare"), **({"with": other} if other else {}))
    if as_json:
        show_json(found)
    elif quiet:
        show_ids([found["left"], found["right"]])
    else:
        show_view(comparison_view(found, everything))


def comparison_view(found: dict[str, Any], everything: bool = False) -> View:
    """A comparison, an answer of the API: settings, then times, then the outcome."""
    left, right = found["left"], found["right"]
    sides = [Column(_title(one, other), wide=True, given=True) for one, other in ((left, right), (right, left))]
    settings = [one for one in found["settings"] if one["differs"] or everything]
    if rows := [(one["key"], one["left"], one["right"]) for one in settings if not one["lines"]]:
        yield Rows([Column("SETTING"), *sides], rows)
        yield ""
    for one in settings:
        if one["lines"]:
            yield f"{one['key']}:"
            yield from (_line(line) for line in one["lines"])
            yield ""
    if not any(one["differs"] for one in settings):
        yield Note(_("Their settings are the same."))
    times = [(_(text), _took(left[key]), _took(right[key])) for key, text in TIMES.items()]
    yield Rows([Column("TIME"), *sides], times)
    yield ""
    yield Rows([Column("OUTCOME"), *sides], list(_outcome(left, right)))
    if equal := sum(not one["differs"] for one in found["settings"]) if not everything else 0:
        yield Note(_n("{n:,} setting the same; to show: --all", "{n:,} settings the same; to show: --all", equal))


def _line(line: dict[str, str]) -> str:
    text = clean(f"{SIGNS[line['of']]} {line['text']}")
    code = COLOURS.get(line["of"])
    return Painted(paint(text, code, sys.stdout)) if code else text


def _title(run: dict[str, Any], other: dict[str, Any]) -> str:
    """Its name; with its id's beginning where both have one name."""
    return f"{run['name']} ({run['id'][:8]})" if run["name"] == other["name"] else str(run["name"])


def _took(seconds: float | None) -> str:
    return "–" if seconds is None else duration_text(seconds)


def _outcome(left: dict[str, Any], right: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
    yield _("user"), left["user"], right["user"]
    yield _("submitted at"), clock_text(left["submitted_at"]), clock_text(right["submitted_at"])
    for key, title in OUTCOME.items():
        one, other = left[key], right[key]
        if key == "cost":
            one, other = (price_text(round(cost, 2)) if cost else None for cost in (one, other))
        if key == "status":
            one, other = word(one), word(other)
        if {one, other} - {None, ""}:
            yield _(title), one, other
