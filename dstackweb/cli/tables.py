"""Tables, and views that are kept up to date: drawn on terminals, plain columns in pipes."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, TypeVar

import typer

from dstackweb.cli.language import _, word
from dstackweb.cli.output import OUTAGE, Painted, clean, clean_lines, echo, note, show_ids, show_json, warn

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


ItemColumns = Mapping[Column, Callable[[dict[str, Any]], object]]
"""The columns of a table of the API's items: what each shows of an item."""


@dataclass(frozen=True)
class Rows:
    """A table as part of a view. On a terminal it is drawn without its empty columns, unless it is to be `whole`;
    elsewhere there is a line per row in aligned columns, never cut off. `None` is shown as an empty cell.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]
    whole: bool = False

    @classmethod
    def of(cls, columns: ItemColumns, items: Sequence[dict[str, Any]]) -> Rows:
        return cls(list(columns), [[value(item) for value in columns.values()] for item in items])

    def show(self, stream: IO[str]) -> None:
        if stream.isatty():
            from rich.console import Console

            Console(file=stream, highlight=False).print(self.drawn())
        else:
            _print_columns(self.columns, [[clean(value) for value in row] for row in self.rows], stream)

    def drawn(self) -> Table:
        """For terminals. Cells that rich draws, such as progress bars, stay as they are."""
        cells: list[list[Any]] = [
            [value if hasattr(value, "__rich_console__") else clean(value) for value in row] for row in self.rows
        ]
        shown = [at for at in range(len(self.columns)) if self.whole or any(row[at] for row in cells)]
        return rich_table([self.columns[at] for at in shown], [[row[at] for at in shown] for row in cells])


class Note(str):
    """A line of a view that goes to stderr where it is printed once."""

    __slots__ = ()


class Warn(Note):
    __slots__ = ()


Fitted = Callable[[int | None], Rows]
"""A table with the columns that a terminal so wide has room for; all of them for None. Watched, it is whole."""
View = Iterable[Rows | Fitted | Note | str]
"""What a command shows, from top to bottom: tables, lines, notes and warnings."""


def rows_or(empty: str, columns: ItemColumns, items: Sequence[dict[str, Any]]) -> View:
    """A table of the items; without any the note `empty`."""
    return [Rows.of(columns, items) if items else Note(empty)]


def show_found(found: dict[str, Any], view: View, as_json: bool, quiet: bool = False, key: str = "id") -> None:
    """Print what the API answers as a view, as it is (`--json`), or the ids of its `items` (`-q`)."""
    if as_json:
        show_json(found)
    elif quiet:
        show_ids(found["items"], key)
    else:
        show_view(view)


def show_csv(api: Api, path: str, **query: Any) -> None:
    text = api.send("GET", path, params={**query, "format": "csv"}).text
    typer.echo(clean_lines(text.replace("\r\n", "\n")), nl=False)


def show_view(view: View, stream: IO[str] | None = None) -> None:
    """Print it once, to stdout or `stream`."""
    for part in view:
        if callable(part):
            part(shutil.get_terminal_size().columns if sys.stdout.isatty() else None).show(sys.stdout)
        elif isinstance(part, Rows):
            part.show(stream or sys.stdout)
        elif isinstance(part, Warn):
            warn(part)
        elif isinstance(part, Note):
            note(part)
        elif isinstance(part, Painted):
            typer.echo(part, file=stream)
        else:
            echo(part, file=stream)


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


def watch_view(
    api: Api,
    value: T,
    fetch: Callable[[], T],
    view: Callable[[T], View],
    is_over: Callable[[T], bool] = lambda _value: False,
    *,
    console: Console | None = None,
    every_s: int = WATCH_S,
    stopped: str | None = None,
) -> None:
    """Draw it each second, fetched again every `every_s` seconds, until it is over or Ctrl-C is pressed.

    While the server doesn't answer the last value stays, with the error below. `stopped` is noted after Ctrl-C.
    """
    from rich.console import Console as Terminal, Group
    from rich.live import Live

    console, trouble, age_s = console or Terminal(highlight=False), "", 0
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(Group(*_drawn(view(value), console.width, trouble)), refresh=True)
                if is_over(value):
                    return
                api.sleep(1)
                age_s += 1
                if age_s >= every_s:
                    age_s = 0
                    try:
                        value, trouble = fetch(), ""
                    except OUTAGE as error:
                        trouble = _("{message} Trying again …", message=error.message)
    except KeyboardInterrupt:
        note(_("Stopped watching.") if stopped is None else stopped)


def _drawn(view: View, width: int, trouble: str) -> Iterator[RenderableType]:
    from rich.text import Text

    for part in view:
        if callable(part):
            yield replace(part(width), whole=True).drawn()
        elif isinstance(part, Rows):
            yield part.drawn()
        elif isinstance(part, Warn):
            yield Text(_("warning: ") + clean_lines(part), style="yellow")
        else:
            yield Text(clean_lines(part), style="dim" if isinstance(part, Note) else "")
    if trouble:
        yield Text(clean_lines(trouble), style="yellow")
