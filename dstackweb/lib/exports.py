"""Tables as files, for spreadsheets (CSV) and for programs (JSON): in blocks of lines, in constant memory."""

from __future__ import annotations

import csv
import datetime as dt
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain, islice
from threading import BoundedSemaphore
from typing import Any

from django.http import StreamingHttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.lib.errors import NotFound, TooMany

Rows = Iterable[Mapping[str, Any]]
BLOCK = 500
"""Rows that are sent at once."""
FORMULA = tuple("=+-@＝＋－＠")
ENDS = frozenset(";\t\r\n")
_SPACE = re.compile(rf"(?<![;\s])[;\s]++(?=[{re.escape(''.join(FORMULA))}])")
AT_ONCE = 2
"""Files that a process writes at once: each has a thread, for minutes where there are a million rows."""
_places = BoundedSemaphore(AT_ONCE)


def as_csv(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """A line per row, after one of the columns. No text begins as a formula of a spreadsheet would."""
    writer = csv.writer(_Echo())
    lines = (writer.writerow([_cell(row.get(name)) for name in columns]) for row in rows)
    yield writer.writerow(columns)
    yield from _blocks(lines)


def as_json(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """One array of objects with the columns, an object per line."""
    objects = (
        json.dumps({name: row.get(name) for name in columns}, default=_plain, ensure_ascii=False) for row in rows
    )
    yield "["
    yield from _blocks((",\n" if number else "\n") + text for number, text in enumerate(objects))
    yield "\n]\n"


Writer = Callable[[Sequence[str], Rows], Iterator[str]]
FORMATS: dict[str, tuple[Writer, str]] = {
    "csv": (as_csv, "text/csv; charset=utf-8"),
    "json": (as_json, "application/json"),
}
"""By the file's extension, what writes it, and its content type."""


def response(name: str, form: str, columns: Sequence[str], rows: Rows) -> StreamingHttpResponse:
    """A table as a file to save, called `name` and today's date. Raises NotFound for another extension.

    The first row is read here: what its reading raises is still an answer, and no file that breaks off. Raises TooMany
    while others are written.
    """
    if form not in FORMATS:
        raise NotFound(
            _("tables are exported as %(formats)s, not as %(form)s")
            % {"formats": " or ".join(FORMATS), "form": repr(form[:20])}
        )
    write, content_type = FORMATS[form]
    place = _Place()
    try:
        rows = iter(rows)
        rows = chain(list(islice(rows, 1)), rows)
    except BaseException:
        place.close()
        raise
    file = StreamingHttpResponse(place.of(write(columns, rows)), content_type=content_type)
    file["Content-Disposition"] = f'attachment; filename="{name}-{timezone.now():%Y-%m-%d}.{form}"'
    return file


class _Place:
    """A file's place among those that are written at once, until it is closed, or no one has it any more."""

    def __init__(self) -> None:
        self._places = _places
        self._blocks: Iterator[str] = iter(())
        self._is_taken = self._places.acquire(blocking=False)
        if not self._is_taken:
            raise TooMany(_("other files are being written; try again in a few seconds"), retry_after=5)

    def of(self, blocks: Iterator[str]) -> _Place:
        self._blocks = blocks
        return self

    def __iter__(self) -> Iterator[str]:
        return self._blocks

    def close(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._places.release()

    __del__ = close


def harmless(text: str) -> str:
    """With a quote before what a spreadsheet would take for a formula, also behind spaces.

    And behind what ends a cell where lists have semicolons: there a quoted text of several cells is not one.
    """
    text = _SPACE.sub(lambda found: f"{found[0]}'" if set(found[0]) & ENDS else found[0], text)
    return f"'{text}" if text[:1] in ENDS or text.strip()[:1] in FORMULA else text


def _blocks(lines: Iterator[str]) -> Iterator[str]:
    while block := "".join(islice(lines, BLOCK)):
        yield block


def _cell(value: Any) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, int | float | Decimal):
        return _plain(value) if isinstance(value, Decimal) else value
    if isinstance(value, Mapping | list):
        value = json.dumps(value, default=_plain, ensure_ascii=False) if value else ""
    return harmless(str(_plain(value)))


def _plain(value: Any) -> Any:
    """A moment as ISO 8601 in UTC, a decimal as a number; text for anything else that JSON doesn't know."""
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")  # as the API has them
    return float(value) if isinstance(value, Decimal) else str(value)


class _Echo:
    """A file for csv.writer, whose lines are what it returns."""

    def write(self, line: str) -> str:
        return line
