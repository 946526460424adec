"""Tables, and views that are kept up to date: drawn on terminals, plain columns in pipes."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, TypeVar

import typer

from dstackweb.cli import wrapping
from dstackweb.cli.language import _
from dstackweb.cli.output import OUTAGE, Painted, clean, clean_lines, echo, note, show_ids, show_json
from dstackweb.cli.values import word

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from dstackweb.cli.client import Api

T = TypeVar("T")

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
    """A table's column. A `wide` one takes the room that is left, and wraps; others stay on one line where they fit.
    A table whose columns have no titles has no heading.

    The title is shown in the user's language; where it is `given`, for example the name of a run, as it is.
    """

    title: str = ""
    right: bool = False
    wide: bool = False
    given: bool = False

    @property
    def heading(self) -> str:
        return self.title if self.given else _(self.title)


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


def rows_or(empty: str, columns: ItemColumns, items: Sequence[dict[str, Any]]) -> View:
    """A table of the items; without any the note `empty`."""
    return [Rows.of(columns, items) if items else Note(empty)]


def show_found(found: dict[str, Any], view: View, as_json: bool, quiet: bool, key: str = "id") -> None:
    """Print what the API answers as a view, as it is (`--json`), or the ids of its `items` (`-q`)."""
    if as_json:
        show_json(found)
    elif quiet:
        show_ids(found["items"], key)
    else:
        show_view(view)


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

    watch(value, fetch, draw, is_over, console or Terminal(highlight=False), api.sleep, WATCH_S, _("Stopped watching."))


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
        texts = [_(title), *map(str, cells[title])] if title in cells else []
        wide = max(map(cells_of, texts), default=-2) + 2
        if 0 < wide <= width + 2:
            shown.add(title)
            width -= wide
    return {title: values for title, values in cells.items() if title in shown}


def rich_table(columns: Sequence[Column], cells: Sequence[Sequence[RenderableType]]) -> Table:
    """A table for terminals; cells that are not text, such as progress bars, are drawn as they are."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    wrapping.use()
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True, show_edge=False)
    table.show_header = any(column.title for column in columns)
    for column in columns:
        table.add_column(
            Text(clean(column.heading)),
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

    if not isinstance(cell, str):
        return cell
    return Text(cell, style="" if column.wide else next((WORD_STYLES[w] for w in WORD_STYLES if word(w) == cell), ""))


def _print_columns(columns: Sequence[Column], cells: Sequence[Sequence[str]], stream: IO[str]) -> None:
    headings = [column.heading for column in columns]
    lines = [headings, *cells] if any(headings) else cells
    widths = [max((cells_of(line[index]) for line in lines), default=0) for index in range(len(columns))]
    for line in lines:
        padded = (
            padding_of(cell, width) + cell if column.right else cell + padding_of(cell, width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        echo("  ".join(padded).rstrip(), file=stream)


def cells_of(text: str) -> int:
    """How many cells of a terminal the text takes: a Chinese character takes two."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1


def padding_of(text: str, width: int) -> str:
    """The blanks that the text lacks to be so wide."""
    return " " * (width - cells_of(text))


def cut(text: str, width: int) -> str:
    """As much of the beginning of a text as is no wider."""
    if cells_of(text) > width:
        ends = accumulate(map(_cells, text))
        return text[: sum(end <= width for end in ends)]
    return text


def bar(value: float | None, most: float, cells: int = BAR) -> str:
    """A bar as long as the share of `value` in `most`, which is `cells` long; empty for zero."""
    if not value or not most:
        return ""
    eighths = max(1, round(8 * cells * value / most))
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


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
                        trouble = _("{message} Trying again …", message=error.message)
    except KeyboardInterrupt:
        note(stopped)
