"""What commands print: results on stdout, notes and errors on stderr; tables on terminals, plain columns in pipes.

Expected errors are shown in a few lines: what happened, what is safe, what to do.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dstackweb.cli import completion
from dstackweb.lib.text import few_accents, in_json
from dstackweb.spec.units import duration_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from dstackweb.cli.client import Api

T = TypeVar("T")

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 1
UNREACHABLE = 3


class ChangeInterrupted(KeyboardInterrupt):
    """Ctrl-C during a request that changes something: the change may have been made."""


class CliError(Exception):
    """An expected error: one sentence, `notes` (what is safe, what to do), and the exit code."""

    code = FAILED

    def __init__(self, message: str, *notes: str) -> None:
        super().__init__(message)
        self.message = message
        self.notes = notes


class UsageError(CliError):
    """The command line, or a setting in the environment, is wrong."""

    code = 2


class Unreachable(CliError):
    """No answer from the server: connection refused, timed out or dropped."""

    code = UNREACHABLE


class ApiError(CliError):
    """The server answered with an error. `status` is the HTTP status, `body` the JSON of the answer."""

    def __init__(self, message: str, *notes: str, status: int, body: dict[str, object] | None = None) -> None:
        super().__init__(message, *notes)
        self.status = status
        self.body = body or {}


class TryLater(ApiError):
    """A 5xx or a 429: the same request may succeed later."""


OUTAGE = (Unreachable, TryLater)
"""Temporary errors: commands that follow a run continue after them."""

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="The run's name (the newest run of that name) or id.", autocompletion=completion.run_names
    ),
]
GIVEN: dict[str, str] = {}
"""Of this call: `server` and `project` where these options were given, and `form` for --json, --quiet or --watch."""


def _form(param: typer.CallbackParam, value: bool) -> bool:
    """Raises UsageError for a second form of output."""
    if value:
        form = param.opts[0]
        if GIVEN.setdefault("form", form) != form:
            raise UsageError(f"{form} can't be combined with {GIVEN['form']}.")
        if form == "--watch" and not sys.stdout.isatty():
            raise UsageError("--watch needs a terminal.")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print the API's answer as JSON.", callback=_form)]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only ids, one a line; names where there are no ids.", callback=_form),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Update until Ctrl-C.", callback=_form)]

DIM, RED, YELLOW = "2", "31;1", "33"

WORD_STYLES = {
    "pending": "dim",
    "submitted": "cyan",
    "provisioning": "blue",
    "running": "green",
    "terminating": "yellow",
    "done": "green dim",
    "failed": "red",
    "terminated": "yellow dim",
    "idle": "green",
    "available": "green",
    "busy": "yellow",
    "unknown": "yellow",
    "no_quota": "red",
    "not_available": "dim",
    "default": "dim",
}
"""Words shown in colour when a narrow cell holds nothing else: statuses, availabilities, origins."""

WATCH_S = 2
"""How often --watch asks the server."""
BAR = 16
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Column:
    """A table's column. A `wide` one takes the room that is left, and wraps; others stay on one line where they fit."""

    title: str
    right: bool = False
    wide: bool = False


def paint(text: str, code: str, stream: IO[str]) -> str:
    """`text` in colour if `stream` is a terminal that shows colours (https://no-color.org)."""
    coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if coloured else text


def clean(value: object) -> str:
    """Text from the server made safe for a terminal: it can't move the cursor or change colours."""
    text = "" if value is None else str(value)
    if not text.isprintable():
        text = "".join(char if char.isprintable() else "\ufffd" for char in text.replace("\n", " "))
    return text if text.isascii() else few_accents(text)


def clean_lines(text: str) -> str:
    """The same for several lines, which may have tabs."""
    return "".join(part if part in ("\n", "\t") else clean(part) for part in re.split("([\n\t])", text))


class Painted(str):
    """Text with colours of our own. All else in it is clean already."""

    __slots__ = ()


def echo(text: str = "", file: IO[str] | None = None) -> None:
    """Print lines: whatever is in a name or a message, it is only text."""
    typer.echo(clean_lines(text), file=file)


def agreed(question: str) -> bool:
    """Whether the user says yes; no by default."""
    return typer.confirm(clean_lines(question), err=True)


def note(text: str) -> None:
    typer.echo(paint(clean_lines(text), DIM, sys.stderr), err=True)


def warn(text: str) -> None:
    typer.echo(f"{paint('warning:', YELLOW, sys.stderr)} {clean_lines(text)}", err=True)


def show_error(error: CliError) -> None:
    """The error on stderr: its message, then a line for each note."""
    typer.echo(f"{paint('error:', RED, sys.stderr)} {clean_lines(error.message)}", err=True)
    for line in error.notes:
        typer.echo(f"  {line if isinstance(line, Painted) else clean_lines(line)}", err=True)


def show_json(data: Any) -> None:
    typer.echo("\n".join(map(in_json, json.dumps(data, indent=2, ensure_ascii=False).split("\n"))))


def show_ids(items: Iterable[Mapping[str, Any]], key: str = "id") -> None:
    for item in items:
        echo(clean(item[key]))


def show_answer(answer: Mapping[str, Any], text: str, as_json: bool, quiet: bool, key: str = "id") -> None:
    """Print the result of a change: a line of text, the API's answer (`--json`), or the ID (`-q`)."""
    if as_json:
        show_json(answer)
    elif quiet:
        show_ids([answer], key)
    else:
        echo(text)


def show_table(columns: Sequence[Column], rows: Sequence[Sequence[object]], stream: IO[str] | None = None) -> None:
    """A table on a terminal, without its empty columns; elsewhere one line per row in aligned columns, never cut off.

    `None` is shown as an empty cell.
    """
    stream = stream or sys.stdout
    cells = [[clean(value) for value in row] for row in rows]
    if stream.isatty():
        from rich.console import Console

        draw_table(Console(file=stream, highlight=False), *_filled(columns, cells))
    else:
        _print_columns(columns, cells, stream)


ItemColumns = Mapping[Column, Callable[[dict[str, Any]], object]]
"""The columns of a table of the API's items: what each shows of an item."""


@dataclass(frozen=True)
class Rows:
    """A table as part of a view."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]

    @classmethod
    def of(cls, columns: ItemColumns, items: Sequence[dict[str, Any]]) -> Rows:
        return cls(list(columns), [[value(item) for value in columns.values()] for item in items])


class Note(str):
    """A line of a view that goes to stderr where it is printed once."""

    __slots__ = ()


View = Iterable[Rows | Note | str]
"""What a command shows, from top to bottom: tables, lines and notes."""


def show_view(view: View) -> None:
    """Print it once."""
    for part in view:
        if isinstance(part, Rows):
            show_table(part.columns, part.rows)
        elif isinstance(part, Note):
            note(part)
        elif isinstance(part, Painted):
            typer.echo(part)
        else:
            echo(part)


def watch_view(
    api: Api,
    value: T,
    fetch: Callable[[], T],
    view: Callable[[T], View],
    is_over: Callable[[T], bool] = lambda _value: False,
    console: Console | None = None,
) -> None:
    """Show it until it is over or Ctrl-C is pressed, fetched again every WATCH_S seconds."""
    from rich.console import Console as Terminal

    def draw(value: T) -> Iterable[RenderableType]:
        from rich.text import Text

        for part in view(value):
            if isinstance(part, Rows):
                cells = [[clean(cell) for cell in row] for row in part.rows]
                yield rich_table(*_filled(part.columns, cells))
            else:
                yield Text(clean_lines(part), style="dim" if isinstance(part, Note) else "")

    watch(value, fetch, draw, is_over, console or Terminal(highlight=False), api.sleep, WATCH_S, "Stopped watching.")


def _filled(
    columns: Sequence[Column], cells: Sequence[Sequence[str]]
) -> tuple[Sequence[Column], Sequence[Sequence[str]]]:
    filled = [index for index in range(len(columns)) if any(row[index] for row in cells)]
    return [columns[index] for index in filled], [[row[index] for index in filled] for row in cells]


def draw_table(console: Console, columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    """A table that fits the console's width: wide columns shrink first, then long words are folded."""
    console.print(rich_table(columns, cells))


def columns_that_fit(
    cells: Mapping[str, Sequence[object]], order: Iterable[str], width: int | None
) -> dict[str, Sequence[object]]:
    """The columns (values by title) that fit a terminal `width` characters wide, those first in `order` preferred.

    All of them where `width` is None.
    """
    if width is None:
        return dict(cells)
    shown: set[str] = set()
    for title in order:
        wide = max(len(title), *(len(str(value)) for value in cells[title])) + 2 if title in cells else 0
        if 0 < wide <= width + 2:
            shown.add(title)
            width -= wide
    return {title: values for title, values in cells.items() if title in shown}


def rich_table(columns: Sequence[Column], cells: Sequence[Sequence[RenderableType]]) -> Table:
    """A table for terminals; cells that are not text, such as progress bars, are drawn as they are."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True, show_edge=False)
    for column in columns:
        table.add_column(
            Text(clean(column.title)),
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=column.right,
            ratio=1 if column.wide else None,
        )
    for row in cells:
        table.add_row(*(_styled(cell, column) for cell, column in zip(row, columns, strict=True)))
    return table


def _styled(cell: RenderableType, column: Column) -> RenderableType:
    from rich.text import Text

    return Text(cell, style="" if column.wide else WORD_STYLES.get(cell, "")) if isinstance(cell, str) else cell


def _print_columns(columns: Sequence[Column], cells: Sequence[Sequence[str]], stream: IO[str]) -> None:
    lines = [[column.title for column in columns], *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        padded = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        echo("  ".join(padded).rstrip(), file=stream)


def bar(value: float | None, most: float, cells: int = BAR) -> str:
    """A bar as long as the share of `value` in `most`, which is `cells` long; empty for zero."""
    if not value or not most:
        return ""
    eighths = max(1, round(8 * cells * value / most))
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def plural(count: int, word: str) -> str:
    """`1 GPU`, `1,200 GPUs`, `2 prefixes`."""
    return f"{count:,} {word}{'' if count == 1 else 'es' if word.endswith('x') else 's'}"


def clock_text(at: str, now: datetime | None = None) -> str:
    """An ISO time in the reader's time zone: `18:40` today, otherwise with its day: `Nov 6, 02:00`."""
    then, today = datetime.fromisoformat(at).astimezone(), (now or datetime.now(UTC)).astimezone()
    return f"{then:%H:%M}" if then.date() == today.date() else f"{then:%b} {then.day}, {then:%H:%M}"


def start_text(starts: dict[str, Any] | None) -> str:
    """When a run starts: `14:05 – 15:30`, `by 18:00`, or why that is unknown; empty for a run that does not wait."""
    if not starts:
        return ""
    if not starts["p50"]:
        return str(starts["detail"])
    from_, by = clock_text(starts["p50"]), clock_text(starts["p90"]) if starts["p90"] else "?"
    if from_ != by:
        return f"{from_} – {by}"
    return f"by {by}" if starts["basis"] == "max_duration" else by


def age_text(since: str | None) -> str:
    """How long ago an ISO time was: `12 s`, `1 h 5 min`. Empty without a time."""
    if not since:
        return ""
    return duration_text((datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds())


def watch(
    value: T,
    fetch: Callable[[], T],
    draw: Callable[[T], Iterable[RenderableType]],
    is_over: Callable[[T], bool],
    console: Console,
    sleep: Callable[[float], None],
    every_s: int = 1,
    stopped: str = "",
) -> None:
    """Draw `value` again each second, and fetch it every `every_s` seconds, until it is over or Ctrl-C is pressed.

    While the server doesn't answer the last value stays, with the error below. `stopped` is noted after Ctrl-C.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    trouble, age_s = "", 0
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(
                    Group(*draw(value), *([Text(clean_lines(trouble), style="yellow")] if trouble else [])),
                    refresh=True,
                )
                if is_over(value):
                    return
                sleep(1)
                age_s += 1
                if age_s >= every_s:
                    age_s = 0
                    try:
                        value, trouble = fetch(), ""
                    except OUTAGE as error:
                        trouble = f"{error.message} Trying again …"
    except KeyboardInterrupt:
        note(stopped)
