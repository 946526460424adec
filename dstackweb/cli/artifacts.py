"""`dstackweb artifacts`: the files that a run's jobs left, listed or saved to a folder."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.language import _, _n, clock_text, file_count, size_text
from dstackweb.cli.options import Json, Quiet, RunName
from dstackweb.cli.output import CliError, UsageError, clean, note
from dstackweb.cli.tables import Column, ItemColumns, rows_or, show_found
from dstackweb.runner.limits import is_safe

COLUMNS: ItemColumns = {
    Column("ATTEMPT", right=True): itemgetter("attempt"),
    Column("NODE", right=True): itemgetter("node"),
    Column("PATH", wide=True): itemgetter("path"),
    Column("SIZE", right=True): lambda one: size_text(one["size"]),
    Column("STORED"): lambda one: clock_text(one["stored_at"]),
}
"""Of artifacts, the items of `GET …/artifacts`."""
PART = ".dstackweb-part"
"""The end of a file's name until all of it is there."""


def artifacts(
    run: RunName,
    download: Annotated[
        Path | None,
        typer.Option("--download", "-o", metavar="DIR", help=_("Save them to this folder."), show_default=False),
    ] = None,
    node: Annotated[int | None, typer.Option(metavar="N", min=0, help=_("Only of this node."))] = None,
    attempt: Annotated[int | None, typer.Option(metavar="N", min=1, help=_("Only of this attempt."))] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the files that a run left in $DSTACKWEB_ARTIFACTS, or save them to DIR/ATTEMPT-NODE/."""
    api = config.connect()
    found = api.get(api.in_project("runs", run))
    path = api.in_project("runs", found["id"], "artifacts")
    listed = api.pages(path)
    for key in ("items", "left_out"):
        listed[key] = [one for one in listed[key] if node in (None, one["node"]) and attempt in (None, one["attempt"])]
    if download is not None:
        _save_all(api, path, listed["items"], download)
    else:
        show_found(listed, rows_or(_("No artifacts."), COLUMNS, listed["items"]), as_json, quiet, "path")
    if not as_json:
        _note_left_out(listed)


def _note_left_out(listed: dict[str, Any]) -> None:
    if not listed["left_out"]:
        return
    number = max(listed["left_out_number"], len(listed["left_out"]))
    note(_n("{n:,} file was not kept:", "{n:,} files were not kept:", number))
    for one in listed["left_out"]:
        size = f" ({size_text(one['size'])})" if one["size"] is not None else ""
        note(f"  {clean(one['path'])}{size}: {clean(one['detail'])}")
    if number > len(listed["left_out"]):
        note("  " + _("and {n:,} more", n=number - len(listed["left_out"])))


def _save_all(api: config.Api, path: str, items: list[dict[str, Any]], folder: Path) -> None:
    saved = there = 0
    for one in items:
        if not is_safe(one["path"]):
            raise CliError(
                _("the server names a file {path!r}, which leads elsewhere.", path=clean(one["path"])),
                _("It was not saved."),
            )
        target = folder / f"{int(one['attempt'])}-{int(one['node'])}" / one["path"]
        try:
            if _is_there(target, one):
                there += 1
                continue
            _save(api, f"{path}/file", one, target)
        except OSError as error:
            raise UsageError(
                _("{file} can't be written: {reason}.", file=target, reason=error.strerror or error)
            ) from None
        saved += 1
        note(f"{target}")
    text = _("{files} saved to {folder}.", files=file_count(saved), folder=folder)
    if there:
        already = _n("{n:,} was there already.", "{n:,} were there already.", there)
        text = _("{sentence} {another}", sentence=text, another=already)
    note(text)


def _is_there(target: Path, one: dict[str, Any]) -> bool:
    if not target.is_file() or target.stat().st_size != one["size"]:
        return False
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == str(one["sha256"])


def _save(api: config.Api, path: str, one: dict[str, Any], target: Path) -> None:
    """Save a file: whole, or not at all. Raises CliError if its bytes are not those that are listed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name.encode()[:200].decode(errors="ignore") + PART)
    query = {"path": one["path"], "node": one["node"], "attempt": one["attempt"]}
    digest = hashlib.sha256()
    try:
        with api.stream(path, query) as response, part.open("wb") as file:
            for piece in response.iter_raw():
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != one["sha256"]:
            raise CliError(
                _("{path} arrived with other bytes than it has.", path=clean(one["path"])),
                _("It was not saved; try again."),
            )
        os.replace(part, target)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
