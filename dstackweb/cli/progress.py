"""`dstackweb progress`: the tasks of a run, or the runs of a project, by the prefix of their names, live."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.language import N_, _, _n, age_text, duration_text, listed, word
from dstackweb.cli.options import Json, flag
from dstackweb.cli.output import ENDED, CliError, UsageError, clean, note, show_json
from dstackweb.cli.tables import (
    Column,
    ItemColumns,
    Note,
    Rows,
    View,
    cells_of,
    columns_that_fit,
    cut,
    show_found,
    show_view,
    watch_view,
)

if TYPE_CHECKING:
    from rich.progress_bar import ProgressBar

AROUND = 8
"""Lines of a terminal that are not rows of the table."""
NO_TASKS = N_("To report tasks, print lines such as  ::task key=train-17 state=done  or use dstackweb.tracking.")

WORDS = {
    "memory": ("DONE", N_("{n:,} done")),
    "erred": ("FAILED", N_("{n:,} failed")),
    "released": ("RELEASED", N_("{n:,} released")),
    "forgotten": ("FORGOTTEN", N_("{n:,} forgotten")),
    "processing": ("RUNNING", N_("{n:,} running")),
    "queued": ("QUEUED", N_("{n:,} queued")),
    "no_worker": ("NO WORKER", N_("{n:,} no worker")),
    "waiting": ("WAITING", N_("{n:,} waiting")),
}
"""The column's title and the text of each task state, in the order of the columns."""
BAR, NARROW_BAR, ROOMY, TIGHT = 24, 12, 110, 60
"""Cells of a progress bar. A terminal narrower than ROOMY gets a narrow bar, one narrower than TIGHT shorter texts."""
BY_IMPORTANCE = (
    N_("PREFIX"), N_("FINISHED"), "", N_("LEFT"), N_("FAILED"), N_("RUNNING"), N_("RATE"), N_("DONE"), N_("WAITING"),
    N_("QUEUED"), N_("NO WORKER"), N_("RELEASED"), N_("FORGOTTEN"), N_("GROUPS"),
)  # fmt: skip
"""The columns; a narrow terminal shows the first that fit."""


def progress(
    run: Annotated[str, typer.Argument(metavar="RUN", help=_("A run's tasks; the project's runs if empty."))] = "",
    groups: Annotated[str, typer.Option(metavar="PREFIX", help=_("List the groups of a prefix."))] = "",
    failed: Annotated[bool, flag("--failed", help=_("List failed tasks, or groups with failed tasks."))] = False,
    find: Annotated[str, typer.Option(metavar="TEXT", help=_("Only names that contain this text."))] = "",
    attempt: Annotated[int | None, typer.Option(metavar="N", min=1, help=_("Attempt; the newest by default."))] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help=_("Maximum number of groups or failed tasks."))] = 50,
    once: Annotated[bool, flag("--once", help=_("Print once and exit."))] = False,
    as_json: Json = False,
) -> None:
    """Show how many tasks are done, failed or running, their rate, and the time left. Live; Ctrl-C exits."""
    api = config.connect()
    base = api.in_project("runs", run, "progress") if run else api.in_project("progress")
    query: dict[str, Any] = {"attempt": attempt} if run else {}
    if attempt and not run:
        raise UsageError(_("--attempt needs a run: name the run."))
    if groups:
        only = {"only": "failed"} if failed else {}
        page = api.pages(f"{base}/groups", most=limit, prefix=groups, find=find, **only, **query)
        empty = _("No groups with failed tasks.") if failed else _("No matching groups.")
        show_found(page, _page_view(page, empty, _groups), as_json)
    elif failed and not run:
        raise UsageError(_("--failed needs a run: name the run."), _("Failed runs: dstackweb ps -a"))
    elif failed:
        page = api.pages(f"{base}/failures", most=limit, **query)
        show_found(page, _page_view(page, _("No failed tasks."), partial(Rows.of, FAILURES)), as_json)
    elif as_json:
        show_json(api.pages(base, "prefixes", find=find, **query))
    elif once or not sys.stdout.isatty():
        overview = api.pages(base, "prefixes", find=find, **query)
        if attempt and _has_no_tasks(overview):
            raise CliError(_("{name} has no tasks in attempt {number}.", name=overview["run"], number=attempt))
        show_view(view_of(overview))
        if overview["total"]["total"] and not overview["prefixes"]:
            note(_("No matching prefixes."))
    else:
        lines = shutil.get_terminal_size().lines - AROUND
        query |= {"find": find, "limit": min(500, max(1, lines))}  # the API lists no more at once
        overview = api.get(base, **query)
        # By id: a newer run may take the name.
        path = api.in_project("runs", overview["id"], "progress") if run else base
        name = clean(overview["run"])
        stopped = _("Stopped watching; {name} continues.", name=name) if name else _("Stopped watching.")
        watch_view(api, overview, lambda: api.get(path, **query), view_of, is_over, every_s=1, stopped=stopped)


def _page_view(page: dict[str, Any], empty: str, table: Callable[[Sequence[dict[str, Any]]], Rows]) -> View:
    yield table(page["items"]) if page["items"] else Note(empty)
    if page["next"]:
        yield Note(_("Showing the first {n}; for more: --limit", n=len(page["items"])))


def _groups(items: Sequence[dict[str, Any]]) -> Rows:
    columns = {
        N_("GROUP"): [name_text(item["name"]) for item in items],
        "FINISHED": [finished_text(item) for item in items],
        **_states(items, everything=not sys.stdout.isatty()),
    }
    return Rows([_column(title) for title in columns], list(zip(*columns.values(), strict=True)))


FAILURES: ItemColumns = {
    Column("TASK"): itemgetter("key"),
    Column("PREFIX"): itemgetter("prefix"),
    Column("AGE", right=True): lambda failure: age_text(failure["at"]),
    Column("MESSAGE", wide=True): itemgetter("message"),
}


def view_of(overview: dict[str, Any]) -> View:
    """The totals and the prefixes; on a terminal with progress bars."""
    yield from summary(overview)
    if _has_no_tasks(overview):
        yield Note(_(NO_TASKS))
    if overview["prefixes"]:
        yield partial(table, overview["prefixes"])
    if overview["next"]:
        yield Note(_("More prefixes: --once"))


def is_over(overview: dict[str, Any]) -> bool:
    # The unfinished tasks of an attempt are released a moment after its end.
    return overview["status"] in ENDED and overview["total"]["total"] == overview["total"]["finished"]


def _has_no_tasks(overview: dict[str, Any]) -> bool:
    return bool(overview["run"] and not overview["total"]["total"])


def summary(overview: Mapping[str, Any]) -> list[str]:
    """The totals in two lines, one if there are none; then a line if reporters are silent."""
    total, of_run = overview["total"], bool(overview["run"])
    name = f"{clean(overview['run'])}: {word(overview['status'])}" if of_run else _("Runs")
    if not total["total"]:
        return [_("{run}, no tasks reported", run=name) if of_run else _("No runs.")]
    parts = [name]
    if of_run and overview["ended"]:
        parts.append(_("attempt {number} ended", number=overview["attempt"]))
    elif of_run:
        parts.append(_("attempt {number}", number=overview["attempt"]))
    values = {"total": total["total"], "percent": 100 * total["finished"] // total["total"]}
    finished = (
        _("{finished:,} of {total:,} tasks finished ({percent} %)", finished=total["finished"], **values)
        if of_run
        else _("{finished:,} of {total:,} runs finished ({percent} %)", finished=total["finished"], **values)
    )
    if of_run:
        groups = _n("{n:,} group", "{n:,} groups", total["groups"])
        prefixes = _n("{n:,} prefix", "{n:,} prefixes", overview["count"])
        finished = listed([finished, _("{groups} in {prefixes}", groups=groups, prefixes=prefixes)])
    first = _("{run}: {progress}", run=listed(parts), progress=finished)
    states = listed([_(WORDS[state][1], n=number) for state, number in counts_of(total).items() if number])
    left = _("{duration} left", duration=left_text(total)) if total["left_s"] is not None else ""
    pace = listed(list(filter(None, [pace_text(total), left])))
    return [first, _("; ").join(filter(None, [states, pace])), *_silence(overview["silent"])]


def _silence(silent: Mapping[str, Any] | None) -> list[str]:
    if silent is None:
        return []
    since = datetime.fromisoformat(silent["since"]).astimezone()
    return [
        _n(
            "No report since {since:%H:%M} ({n:,} reporter with unfinished tasks, perhaps killed), so no time left is "
            "given.",
            "No report since {since:%H:%M} ({n:,} reporters with unfinished tasks, perhaps killed), so no time left is "
            "given.",
            silent["reporters"],
            since=since,
        )
    ]


def counts_of(item: Mapping[str, Any]) -> dict[str, int]:
    """Tasks by how they ended or what they do: those that were released or forgotten later are done or failed."""
    ended = item["outcomes"]
    counts = {
        **item["states"], "memory": ended["done"], "erred": ended["failed"], "released": ended["released"],
        "forgotten": ended["forgotten"],
    }  # fmt: skip
    return {state: counts[state] for state in WORDS}


def name_text(name: str) -> str:
    """A name that can be seen: in quotes if it is blank at its ends."""
    text = clean(name)
    return text if text and text.strip() == text else repr(text)


def finished_text(item: Mapping[str, Any], short: bool = False) -> str:
    """`41/52 78 %`, in short `78 %`. 100 % only when nothing is left."""
    finished, total = item["finished"], item["total"]
    percent = f"{100 * finished // total if total else 100:3} %"
    return percent.strip() if short else f"{finished:,}/{total:,} {percent}"


def pace_text(item: Mapping[str, Any]) -> str:
    return rate_text(item["rate_per_s"]) if item["total"] > item["finished"] else ""


def rate_text(per_s: float | None) -> str:
    """`12/s`, `4.1/min`, `2.0/h`; empty for None."""
    if per_s is None:
        return ""
    for factor, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if per_s * factor >= 1 or unit == "h":
            break
    value = per_s * factor
    return f"{value:,.0f}/{unit}" if value >= 10 else f"{value:.1f}/{unit}"


def left_text(item: Mapping[str, Any], short: bool = False) -> str:
    """`12 min (9 min–20 min)`; `12 min` in short or if both ends are alike; `?` if it is unknown."""
    if item["left_s"] is None:
        return "?" if item["total"] > item["finished"] else ""
    low, high = duration_text(item["left_low_s"]), item["left_high_s"]
    far = None if high is None else duration_text(high)
    left = duration_text(item["left_s"])
    if short or low == far:
        return left
    return f"{left} ({f'≥{low}' if far is None else f'{low}–{far}'})"


def table(items: Sequence[Mapping[str, Any]], width: int | None) -> Rows:
    """A line for each prefix: all columns, or those that fit a terminal `width` characters wide, with bars."""
    short = width is not None and width < TIGHT
    longest = None if width is None else max(8, width // 4)
    bar = NARROW_BAR if width is None or width < ROOMY else BAR
    cells: dict[str, Sequence[object]] = {
        "PREFIX": [_cut(name_text(item["name"]), longest) for item in items],
        "": [" " * bar] * len(items),
        "FINISHED": [finished_text(item, short) for item in items],
        **_states(items, everything=width is None),
        "GROUPS": [f"{item['groups']:,}" for item in items],
        "RATE": [pace_text(item) for item in items],
        "LEFT": [left_text(item, short) for item in items],
    }
    if width is None:
        del cells[""]
    shown = columns_that_fit(cells, BY_IMPORTANCE, width)
    if "" in shown:
        shown[""] = [_bar(item, bar) for item in items]
    return Rows([_column(title) for title in shown], list(zip(*shown.values(), strict=True)), whole=True)


def _bar(item: Mapping[str, Any], width: int) -> ProgressBar:
    """Red where tasks have failed."""
    from rich.progress_bar import ProgressBar

    style = "red" if item["outcomes"]["failed"] else "green"
    return ProgressBar(max(1, item["total"]), item["finished"], width, complete_style=style, finished_style=style)


def _states(items: Sequence[Mapping[str, Any]], everything: bool) -> dict[str, list[str]]:
    """The tasks of each item in a state, by the column's title; without `everything` only states that occur."""
    counts = [counts_of(item) for item in items]
    columns = {title: [each[state] for each in counts] for state, (title, _text) in WORDS.items()}
    return {title: [f"{n:,}" for n in values] for title, values in columns.items() if everything or any(values)}


def _column(title: str) -> Column:
    return Column(title, right=title not in ("PREFIX", "GROUP", ""))


def _cut(text: str, longest: int | None) -> str:
    return text if longest is None or cells_of(text) <= longest else cut(text, longest - 1) + "…"
