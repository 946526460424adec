"""`dstackweb progress`: the tasks of a run, or the runs of a project, by the prefix of their names, live."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.output import (
    Column,
    Json,
    UsageError,
    age_text,
    clean,
    clean_lines,
    columns_that_fit,
    echo,
    note,
    plural,
    rich_table,
    show_json,
    show_table,
    watch,
)  # fmt: skip
from dstackweb.cli.runs import ENDED
from dstackweb.spec.units import duration_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from dstackweb.cli.client import Api

PAGE = 500
AROUND = 8
"""Lines of a terminal that are not rows of the table."""
NO_TASKS = "To report tasks, print lines such as  ::task key=train-17 state=done  or use dstackweb.tracking."

WORDS = {
    "memory": "done", "erred": "failed", "released": "released", "forgotten": "forgotten", "processing": "running",
    "queued": "queued", "no_worker": "no worker", "waiting": "waiting",
}  # fmt: skip
"""The words for task states, in the order of the columns."""
BAR, NARROW_BAR, ROOMY, TIGHT = 24, 12, 110, 60
"""Cells of a progress bar. A terminal narrower than ROOMY gets a narrow bar, one narrower than TIGHT shorter texts."""
BY_IMPORTANCE = (
    "PREFIX", "FINISHED", "", "LEFT", "FAILED", "RUNNING", "RATE", "DONE", "WAITING", "QUEUED", "NO WORKER",
    "RELEASED", "FORGOTTEN", "GROUPS",
)  # fmt: skip
"""The columns; a narrow terminal shows the first that fit."""


def progress(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's tasks; the project's runs if empty.")] = "",
    groups: Annotated[str, typer.Option(metavar="PREFIX", help="List the groups of a prefix.")] = "",
    failed: Annotated[bool, typer.Option("--failed", help="List failed tasks, or groups with failed tasks.")] = False,
    find: Annotated[str, typer.Option(metavar="TEXT", help="Only names that contain this text.")] = "",
    attempt: Annotated[int | None, typer.Option(min=1, help="Attempt; the newest by default.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of groups or failed tasks.")] = 50,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show how many tasks are done, failed or running, their rate, and the time left. Live; Ctrl-C exits."""
    api = config.connect()
    base = api.in_project("runs", run, "progress") if run else api.in_project("progress")
    query: dict[str, Any] = {"attempt": attempt} if run else {}
    if attempt and not run:
        raise UsageError("--attempt needs a run: name the run.")
    if groups:
        only = {"only": "failed"} if failed else {}
        page = pages(api, f"{base}/groups", limit, prefix=groups, find=find, **only, **query)
        _show(page, as_json, "No groups with failed tasks." if failed else "No matching groups.", show_groups)
    elif failed and not run:
        raise UsageError("--failed needs a run: name the run.", "Failed runs: dstackweb ps -a")
    elif failed:
        page = pages(api, f"{base}/failures", limit, **query)
        _show(page, as_json, "No failed tasks.", show_failures)
    elif as_json:
        show_json(all_prefixes(api, base, find=find, **query))
    elif once or not sys.stdout.isatty():
        show_once(all_prefixes(api, base, find=find, **query))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        query |= {"find": find, "limit": min(PAGE, max(1, console.height - AROUND))}
        overview = api.get(base, **query)
        # By id: a newer run may take the name.
        path = api.in_project("runs", overview["id"], "progress") if run else base
        show_live(api, path, query, overview, console)


def all_prefixes(api: Api, path: str, **query: Any) -> dict[str, Any]:
    """The overview with all prefixes, of which there are at most 2,000."""
    overview: dict[str, Any] = api.get(path, limit=PAGE, **query)
    while overview["next"]:
        more = api.get(path, limit=PAGE, cursor=overview["next"], **query)
        overview["prefixes"] += more["prefixes"]
        overview["next"] = more["next"]
    return overview


def pages(api: Api, path: str, limit: int, **query: Any) -> dict[str, Any]:
    """Up to `limit` items of a list, and the cursor of the next page."""
    found: dict[str, Any] = {"items": [], "next": ""}
    while found["next"] is not None and len(found["items"]) < limit:
        more = api.get(path, limit=min(PAGE, limit - len(found["items"])), cursor=found["next"], **query)
        found = {"items": found["items"] + more["items"], "next": more["next"]}
    return found


def _show(page: dict[str, Any], as_json: bool, empty: str, show: Callable[[Sequence[dict[str, Any]]], None]) -> None:
    if as_json:
        show_json(page)
    elif not page["items"]:
        note(empty)
    else:
        show(page["items"])
        if page["next"]:
            note(f"Showing the first {len(page['items'])}; for more: --limit")


def show_groups(items: Sequence[dict[str, Any]]) -> None:
    columns = {
        "GROUP": [name_text(item["name"]) for item in items],
        "FINISHED": [finished_text(item) for item in items],
        **_states(items, everything=not sys.stdout.isatty()),
    }
    show_table([_column(title) for title in columns], list(zip(*columns.values(), strict=True)))


def show_failures(items: Sequence[dict[str, Any]]) -> None:
    columns = [Column("TASK"), Column("PREFIX"), Column("AGE", right=True), Column("MESSAGE", wide=True)]
    show_table(columns, [(item["key"], item["prefix"], age_text(item["at"]), item["message"]) for item in items])


def show_once(overview: dict[str, Any]) -> None:
    for line in summary(overview):
        echo(line)
    if _has_no_tasks(overview):
        note(NO_TASKS)
    elif overview["prefixes"] and sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        console.print(drawn(overview["prefixes"], console.width))
    elif overview["prefixes"]:
        show_table(*table(overview["prefixes"], None))


def show_live(api: Api, path: str, query: dict[str, Any], overview: dict[str, Any], console: Console) -> None:
    """Draw the totals and the prefixes that fit each second until the run has ended, or Ctrl-C."""

    def draw(overview: dict[str, Any]) -> Iterator[RenderableType]:
        from rich.text import Text

        yield from (Text(clean_lines(line)) for line in summary(overview))
        if _has_no_tasks(overview):
            yield Text(NO_TASKS, style="dim")
        if overview["prefixes"]:
            yield drawn(overview["prefixes"], console.width)
        if overview["next"]:
            yield Text("More prefixes: --once", style="dim")

    def is_over(overview: dict[str, Any]) -> bool:
        # The unfinished tasks of an attempt are released a moment after its end.
        return overview["status"] in ENDED and overview["total"]["total"] == overview["total"]["finished"]

    stopped = f"Stopped watching; {clean(overview['run'])} continues." if overview["run"] else "Stopped watching."
    watch(overview, lambda: api.get(path, **query), draw, is_over, console, api.sleep, stopped=stopped)


def _has_no_tasks(overview: dict[str, Any]) -> bool:
    return bool(overview["run"] and not overview["total"]["total"])


def summary(overview: Mapping[str, Any]) -> list[str]:
    """The totals in two lines, one if there are none; then a line if reporters are silent."""
    total, of_run = overview["total"], bool(overview["run"])
    name = f"{clean(overview['run'])}: {overview['status']}" if of_run else "Runs"
    if not total["total"]:
        return [f"{name}, no tasks reported" if of_run else "No runs."]
    attempt = f", attempt {overview['attempt']}{' ended' if overview['ended'] else ''}" if of_run else ""
    groups = f", {plural(total['groups'], 'group')} in {plural(overview['count'], 'prefix')}" if of_run else ""
    percent = 100 * total["finished"] // total["total"]
    things = "tasks" if of_run else "runs"
    first = f"{name}{attempt}: {total['finished']:,} of {total['total']:,} {things} finished ({percent} %){groups}"
    states = ", ".join(f"{number:,} {WORDS[state]}" for state, number in counts_of(total).items() if number)
    left = f"{left_text(total)} left" if total["left_s"] is not None else ""
    pace = ", ".join(filter(None, [pace_text(total), left]))
    return [first, f"{states}; {pace}" if pace else states, *_silence(overview["silent"])]


def _silence(silent: Mapping[str, Any] | None) -> list[str]:
    """What is said of reporters that stopped reporting."""
    if silent is None:
        return []
    since = datetime.fromisoformat(silent["since"]).astimezone()
    who = plural(silent["reporters"], "reporter")
    return [f"No report since {since:%H:%M} ({who} with unfinished tasks, perhaps killed), so no time left is given."]


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
    """How fast tasks finish; empty when all have."""
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


def table(items: Sequence[Mapping[str, Any]], width: int | None) -> tuple[list[Column], list[list[object]]]:
    """A line for each prefix: all columns, or those that fit a terminal `width` characters wide.

    For a terminal the column without a title has room for a progress bar.
    """
    short = width is not None and width < TIGHT
    longest = None if width is None else max(8, width // 4)
    cells: dict[str, Sequence[object]] = {
        "PREFIX": [_cut(name_text(item["name"]), longest) for item in items],
        "": [" " * (NARROW_BAR if width is None or width < ROOMY else BAR)] * len(items),
        "FINISHED": [finished_text(item, short) for item in items],
        **_states(items, everything=width is None),
        "GROUPS": [f"{item['groups']:,}" for item in items],
        "RATE": [pace_text(item) for item in items],
        "LEFT": [left_text(item, short) for item in items],
    }
    if width is None:
        del cells[""]
    shown = columns_that_fit(cells, BY_IMPORTANCE, width)
    return [_column(title) for title in shown], [list(row) for row in zip(*shown.values(), strict=True)]


def drawn(items: Sequence[Mapping[str, Any]], width: int) -> Table:
    """The table with progress bars, red where tasks have failed."""
    from rich.progress_bar import ProgressBar

    columns, rows = table(items, width)

    def cell(item: Mapping[str, Any], column: Column, value: object) -> RenderableType:
        if column.title:
            return str(value)
        style = "red" if item["outcomes"]["failed"] else "green"
        return ProgressBar(max(1, item["total"]), item["finished"], len(str(value)), complete_style=style,
                           finished_style=style)  # fmt: skip

    return rich_table(
        columns,
        [
            [cell(item, column, value) for column, value in zip(columns, row, strict=True)]
            for item, row in zip(items, rows, strict=True)
        ],
    )


def _states(items: Sequence[Mapping[str, Any]], everything: bool) -> dict[str, list[str]]:
    """The tasks of each item in a state, by the column's title; without `everything` only states that occur."""
    counts = [counts_of(item) for item in items]
    columns = {word.upper(): [each[state] for each in counts] for state, word in WORDS.items()}
    return {title: [f"{n:,}" for n in values] for title, values in columns.items() if everything or any(values)}


def _column(title: str) -> Column:
    return Column(title, right=title not in ("PREFIX", "GROUP", ""))


def _cut(text: str, longest: int | None) -> str:
    return text if longest is None or len(text) <= longest else text[: longest - 1] + "…"
