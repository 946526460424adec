"""How the command speaks: results on stdout, remarks and errors on stderr; tables on terminals, columns in pipes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any

import typer

from dstackweb.cli.errors import CliError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

BOLD, DIM, RED, YELLOW = "1", "2", "31;1", "33"

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
"""Words that are coloured where they fill a narrow cell: statuses, availabilities, origins."""


@dataclass(frozen=True)
class Column:
    """A table's column. One with `wide` takes what room is left, and wraps; the others keep to one line if they can."""

    title: str
    right: bool = False
    wide: bool = False


def paint(text: str, code: str, stream: IO[str]) -> str:
    """`text` in a colour where `stream` is a terminal that wants one (https://no-color.org)."""
    coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if coloured else text


def clean(value: object) -> str:
    """Text from the server, fit for a terminal: nothing in it can move the cursor or change colours."""
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() else "\ufffd" for char in text.replace("\n", " "))


def note(text: str) -> None:
    """A remark on stderr."""
    typer.echo(paint(text, DIM, sys.stderr), err=True)


def warn(text: str) -> None:
    """Something to look at, on stderr."""
    typer.echo(f"{paint('warning:', YELLOW, sys.stderr)} {text}", err=True)


def show_error(error: CliError) -> None:
    """The error on stderr: what happened, then each of its notes on a line."""
    typer.echo(f"{paint('error:', RED, sys.stderr)} {error.message}", err=True)
    for line in error.notes:
        typer.echo(f"  {line}", err=True)


def show_json(data: Any) -> None:
    """Data as the API gave it, for scripts."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def show_table(columns: Sequence[Column], rows: Sequence[Sequence[object]], stream: IO[str] | None = None) -> None:
    """A table on a terminal; elsewhere one line per row in aligned columns, nothing cut off or wrapped.

    `None` shows as nothing.
    """
    stream = stream or sys.stdout
    cells = [[clean(value) for value in row] for row in rows]
    if stream.isatty():
        from rich.console import Console

        draw_table(Console(file=stream, highlight=False), columns, cells)
    else:
        _print_columns(columns, cells, stream)


def draw_table(console: Console, columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    """A table that fits the console's width: the wide columns give way first, then long words are folded."""
    console.print(rich_table(columns, cells))


def rich_table(columns: Sequence[Column], cells: Sequence[Sequence[str | Text]]) -> Table:
    """A table as terminals show it; a Text keeps its own colours."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True, show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=column.right,
            ratio=1 if column.wide else None,
        )
    for row in cells:
        table.add_row(*(_styled(cell, column) for cell, column in zip(row, columns, strict=True)))
    return table


def _styled(cell: str | Text, column: Column) -> Text:
    from rich.text import Text

    if isinstance(cell, Text):
        return cell
    return Text(cell, style="" if column.wide else WORD_STYLES.get(cell, ""))


def _print_columns(columns: Sequence[Column], cells: Sequence[Sequence[str]], stream: IO[str]) -> None:
    lines = [[column.title for column in columns], *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        padded = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        typer.echo("  ".join(padded).rstrip(), file=stream)


def size_text(size: float) -> str:
    """Bytes in words, 1 KB being 1024 bytes: `3.4 MB`."""
    for unit in ("bytes", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GB"


def clock_text(at: str, now: datetime | None = None) -> str:
    """An ISO time on the reader's clock: `18:40` today, otherwise with its day: `Nov 6, 02:00`."""
    then, today = datetime.fromisoformat(at).astimezone(), (now or datetime.now(UTC)).astimezone()
    return f"{then:%H:%M}" if then.date() == today.date() else f"{then:%b} {then.day}, {then:%H:%M}"


def age_text(since: str | None, now: datetime | None = None) -> str:
    """How long ago an ISO time was, in its largest unit: `12s`, `5m`, `3h`, `2d`. Nothing for no time."""
    if not since:
        return ""
    seconds = max(0, int(((now or datetime.now(UTC)) - datetime.fromisoformat(since)).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
