"""Counters of tasks as lines of a terminal: bars, words for their states, rates and what is left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dstackweb.cli.history import wait_text
from dstackweb.cli.output import Column, clean

if TYPE_CHECKING:
    from rich.table import Table

WORDS = {
    "memory": "done", "erred": "failed", "released": "released", "forgotten": "forgotten", "processing": "running",
    "queued": "queued", "no_worker": "no worker", "waiting": "waiting",
}  # fmt: skip
"""What people call the states, in the order in which a bar shows them."""

GLYPHS = {
    "memory": "█", "erred": "✗", "released": "▓", "forgotten": "▓", "processing": "▒", "queued": "░",
    "no_worker": "!", "waiting": "·",
}  # fmt: skip
STYLES = {"█": "green", "✗": "bold red", "▓": "green dim", "▒": "cyan", "░": "blue", "!": "bold red", "·": "dim"}
BAR, NARROW_BAR, ROOMY, TIGHT = 24, 12, 110, 60
"""Cells of a bar; in a terminal of fewer characters than the third its bars are narrow, of fewer than the last what has
finished is told in percent only, and what is left without its range."""

MOST_TELLING = (
    "PREFIX", "FINISHED", "BAR", "LEFT", "FAILED", "RUNNING", "RATE", "DONE", "WAITING", "QUEUED", "NO WORKER",
    "RELEASED", "FORGOTTEN", "GROUPS",
)  # fmt: skip
"""The columns; a narrow terminal has room for the first ones only."""


def counts_of(item: Mapping[str, Any]) -> dict[str, int]:
    """All eight states of a prefix or a group as the API tells it."""
    told = {**item["states"], "forgotten": item["forgotten"]}
    return {state: told[state] for state in WORDS}


def bar(counts: Mapping[str, int], cells: int) -> str:
    """So many cells, shared by the states as their tasks are; whatever there is has one at least, if there is room."""
    total = sum(counts.values())
    if not total:
        return ""
    exact = {state: number * cells / total for state, number in counts.items() if number}
    shares = {state: max(1, int(share)) for state, share in exact.items()}
    while (missing := cells - sum(shares.values())) > 0:
        for state in sorted(exact, key=lambda state: shares[state] - exact[state])[:missing]:
            shares[state] += 1
    while sum(shares.values()) > cells:
        shares[max(shares, key=lambda state: (shares[state] > 1, shares[state] - exact[state]))] -= 1
    return "".join(GLYPHS[state] * shares.get(state, 0) for state in WORDS)


def finished_text(item: Mapping[str, Any], short: bool = False) -> str:
    """`41/52 78 %`, in short `78 %`: all of it only where nothing is left."""
    done, total = item["finished"], item["total"]
    percent = f"{100 * done // total if total else 100:3} %"
    return percent.strip() if short else f"{done:,}/{total:,} {percent}"


def pace_text(item: Mapping[str, Any]) -> str:
    """How fast tasks finish, while any is left."""
    return rate_text(item["rate_per_s"]) if item["total"] > item["finished"] else ""


def rate_text(per_s: float | None) -> str:
    """`12/s`, `4.1/min`, `2.0/h`; nothing for none."""
    if per_s is None:
        return ""
    for factor, unit in ((1, "s"), (60, "min"), (3600, "h")):
        if per_s * factor >= 1 or unit == "h":
            break
    value = per_s * factor
    return f"{value:,.0f}/{unit}" if value >= 10 else f"{value:.1f}/{unit}"


def left_text(item: Mapping[str, Any], short: bool = False) -> str:
    """`12m (9m–20m)`, `12m` in short or where both ends read alike; `?` where nobody can say when the rest is done."""
    if item["left_s"] is None:
        return "?" if item["total"] > item["finished"] else ""
    low, high = wait_text(int(item["left_low_s"])), item["left_high_s"]
    far = None if high is None else wait_text(int(high))
    left = wait_text(int(item["left_s"]))
    if short or low == far:
        return left
    return f"{left} ({f'≥{low}' if far is None else f'{low}–{far}'})"


def states(items: Sequence[Mapping[str, Any]], everything: bool) -> dict[str, list[str]]:
    """How many of each item are in a state, by its word as a title; of states that don't occur only where asked."""
    counted = [counts_of(item) for item in items]
    found = {word.upper(): [counts[state] for counts in counted] for state, word in WORDS.items()}
    return {title: [f"{n:,}" for n in values] for title, values in found.items() if everything or any(values)}


def groups_table(items: Sequence[Mapping[str, Any]], everything: bool) -> tuple[list[Column], list[tuple[object, ...]]]:
    """A line for each group."""
    columns: dict[str, Sequence[object]] = {
        "GROUP": [item["name"] for item in items],
        "FINISHED": [finished_text(item) for item in items],
        **states(items, everything),
    }
    return [_column(title) for title in columns], list(zip(*columns.values(), strict=True))


def table(items: Sequence[Mapping[str, Any]], width: int | None) -> tuple[list[Column], list[tuple[object, ...]]]:
    """A line for each prefix: all figures, or what a terminal of `width` characters has room for, with bars."""
    longest = None if width is None else max(8, width // 4)
    cells = NARROW_BAR if width is None or width < ROOMY else BAR
    short = width is not None and width < TIGHT
    columns: dict[str, Sequence[object]] = {
        "PREFIX": [_cut(clean(item["name"]), longest) for item in items],
        "BAR": [bar(counts_of(item), cells) for item in items],
        "FINISHED": [finished_text(item, short) for item in items],
        **states(items, everything=width is None),
        "GROUPS": [f"{item['groups']:,}" for item in items],
        "RATE": [pace_text(item) for item in items],
        "LEFT": [left_text(item, short) for item in items],
    }
    if width is None:
        del columns["BAR"]
    shown = set(columns)
    if width is not None:
        shown = _that_fit(columns, width)
    kept = {title: values for title, values in columns.items() if title in shown}
    return [_column(title) for title in kept], list(zip(*kept.values(), strict=True))


def _that_fit(columns: Mapping[str, Sequence[object]], width: int) -> set[str]:
    shown: set[str] = set()
    for title in MOST_TELLING:
        wide = max(len(title), *(len(str(value)) for value in columns[title])) + 2 if title in columns else 0
        if 0 < wide <= width + 2:
            shown.add(title)
            width -= wide
    return shown


def _column(title: str) -> Column:
    return Column("" if title == "BAR" else title, right=title not in ("PREFIX", "GROUP", "BAR"))


def _cut(text: str, longest: int | None) -> str:
    return text if longest is None or len(text) <= longest else text[: longest - 1] + "…"


def drawn(items: Sequence[Mapping[str, Any]], width: int) -> Table:
    """The table with its bars in colours."""
    from rich.text import Text

    from dstackweb.cli.output import rich_table

    columns, rows = table(items, width)

    def cell(column: Column, value: object) -> str | Text:
        return clean(value) if column.title else Text.assemble(*((glyph, STYLES[glyph]) for glyph in str(value)))

    return rich_table(columns, [[cell(*each) for each in zip(columns, row, strict=True)] for row in rows])


def summary(told: Mapping[str, Any]) -> list[str]:
    """What it all comes to, in two lines; in one where nothing was told."""
    total, things = told["total"], "tasks" if told["run"] else "runs"
    name = f"{clean(told['run'])}: {told['status']}" if told["run"] else "Runs"
    if not total["total"]:
        return [f"{name}, no tasks were reported" if told["run"] else "No runs yet."]
    attempt = f", attempt {told['attempt']}{' is over' if told['ended'] else ''}" if told["run"] else ""
    groups = "" if not told["run"] else f", {_number(total['groups'], 'group')} of {_number(told['count'], 'prefix')}"
    share = 100 * total["finished"] // total["total"]
    first = f"{name}{attempt}: {total['finished']:,} of {total['total']:,} {things} finished ({share} %){groups}"
    parts = [f"{number:,} {WORDS[state]}" for state, number in counts_of(total).items() if number]
    pace = [pace_text(total)] if pace_text(total) else []
    pace += [f"{left_text(total)} left"] if total["left_s"] is not None else []
    return [first, "; ".join([", ".join(parts), *([", ".join(pace)] if pace else [])])]


def _number(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 'es' if word.endswith('x') else 's'}"
