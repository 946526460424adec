"""What a page shows of an artifact: a picture by what its bytes are, not by its name; rows of a table; or text."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from dstackweb.lib.text import without_escapes
from dstackweb.runs import artifacts
from dstackweb.runs.models import Artifact

MAGIC = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
IMAGE_MAX = 32 << 20
"""Larger pictures are only downloaded."""
TEXT_BYTES, TABLE_BYTES = 1 << 16, 1 << 18
ROWS, COLUMNS, CELL_CHARS = 200, 50, 200
ENCODING = "utf-8-sig"
"""UTF-8, perhaps with the mark at its beginning that spreadsheets write."""
TABLES = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Preview:
    """What a page shows of a file: an image, a table's rows, a text, or nothing of these. `cut`: there is more."""

    image: str = ""
    table: list[list[str]] | None = None
    text: str | None = None
    cut: bool = False


def image_type(data: bytes) -> str:
    """The type of a picture that browsers may show, by its first bytes; empty for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), "")


def image_of(artifact: Artifact) -> str:
    """The type of a picture that pages may show; empty for another file. Raises Gone."""
    return image_type(head(artifact, 16)) if artifact.size <= IMAGE_MAX else ""


def head(artifact: Artifact, size: int) -> bytes:
    """Its first bytes. Raises Gone."""
    return b"".join(artifacts.read(artifact, 0, min(size, artifact.size)))


def preview(artifact: Artifact) -> Preview:
    """What a page shows of it. Raises Gone."""
    data = head(artifact, TABLE_BYTES)
    if kind := image_type(data):
        return Preview(image=kind) if artifact.size <= IMAGE_MAX else Preview()
    if b"\0" in data[:TEXT_BYTES]:
        return Preview()
    for ending, delimiter in TABLES.items():
        if artifact.path.lower().endswith(ending) and (rows := _rows(data.decode(ENCODING, "replace"), delimiter)):
            shown = [[_short(cell) for cell in row[:COLUMNS]] for row in rows[:ROWS]]
            is_whole = len(data) == artifact.size and shown == rows
            return Preview(table=shown, cut=not is_whole)
    text = without_escapes(data[:TEXT_BYTES].decode(ENCODING, "replace"))
    return Preview(text=text, cut=artifact.size > TEXT_BYTES)


def _rows(text: str, delimiter: str) -> list[list[str]]:
    """The first rows of a table, one more than are shown; none of what is no table."""
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            rows.append(row)
            if len(rows) > ROWS:
                break
    except csv.Error:
        return []
    return rows


def _short(cell: str) -> str:
    return cell if len(cell) <= CELL_CHARS else cell[:CELL_CHARS] + "…"
