"""`dstackweb apply`: plan, ask, ship the code, submit, follow."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from dstackweb.cli.archive import Packed, pack
from dstackweb.cli.client import BASE, Api
from dstackweb.cli.errors import FAILED, INTERRUPTED, CliError, Refused
from dstackweb.cli.logs import Cursor, Follower, status_text
from dstackweb.cli.output import note, size_text, warn
from dstackweb.cli.plan import show_plan, show_position
from dstackweb.cli.runfile import RunFile, explain, read

CHUNK = 1 << 16


@dataclass(frozen=True)
class Options:
    """What the command line says. `overrides` are keys of the run file; `yes` skips the question, `force` any."""

    file: Path
    overrides: dict[str, Any] = field(default_factory=dict)
    code: bool = True
    yes: bool = False
    force: bool = False
    detach: bool = False
    dry_run: bool = False


def apply(api: Api, options: Options) -> int:
    """Submit a run and follow it; returns the exit code of the command, which is the run's where it was followed."""
    submitting = False
    try:
        limits = api.get(f"{BASE}/limits")
        file = read(options.file, limits["config_bytes"])
        body = {"config": file.text, "env": file.env_from_here(), "overrides": options.overrides}
        plan = _post(api, file, "plan", body)
        packed = _pack(limits["archive_bytes"]) if options.code else None
        if options.yes and options.detach and not options.dry_run:
            show_position(plan, sys.stderr)  # a script's loop: nobody reads twenty plans
        else:
            show_plan(plan, _code_text(packed, limits["archive_bytes"]), sys.stdout if options.dry_run else sys.stderr)
        for warning in plan["warnings"]:
            warn(warning["message"])
        if options.dry_run:
            note("A dry run: nothing was submitted.")
            return 0
        if not _may_submit(plan, options):
            note("Nothing was submitted.")
            return FAILED
        if packed:
            _upload(api, packed)
        submitting = True
        run = _post(api, file, "", {**body, "archive": packed.sha256 if packed else None})
    except (KeyboardInterrupt, typer.Abort):
        note(
            "\nInterrupted: it may have been submitted, dstackweb ps tells."
            if submitting
            else "\nNothing was submitted."
        )
        return INTERRUPTED
    if options.detach:
        note(f"Submitted {run['name']}. Follow it: dstackweb logs -f {run['name']}")
        typer.echo(run["name"])
        return 0
    return _follow(api, run)


def exit_code(run: dict[str, Any]) -> int:
    """A run's own exit code as the command's: 0 for done alone, 1 where an end that isn't has none."""
    if run["status"] == "done":
        return 0
    return int(run["exit_code"] or 1)


def _post(api: Api, file: RunFile, what: str, body: dict[str, Any]) -> dict[str, Any]:
    path = api.in_project("runs", *([what] if what else []))
    headers = {} if what else {"Idempotency-Key": str(uuid.uuid4())}
    try:
        answer: dict[str, Any] = api.json(api.send("POST", path, json=body, headers=headers, repeatable=True))
        return answer
    except Refused as refused:
        raise explain(refused, file) if refused.status == 422 else refused from None


def _pack(limit: int) -> Packed:
    with _progress("Packing") as progress:
        packed = pack(Path.cwd(), limit, progress)
    if packed.links_left_out:
        warn(f"left out, since they lead out of this directory: {', '.join(packed.links_left_out)}")
    return packed


def _code_text(packed: Packed | None, limit: int) -> str:
    if packed is None:
        return "none (--no-code)"
    files = f"{packed.files} file{'' if packed.files == 1 else 's'}"
    return f"{files} of {Path.cwd()}, {size_text(packed.size)} packed (limit {size_text(limit)})"


def _may_submit(plan: dict[str, Any], options: Options) -> bool:
    """Ask where there is a warning, and otherwise only somebody at a terminal: a script means what it says."""
    if options.force:
        return True
    if not plan["warnings"]:
        return options.yes or not sys.stdin.isatty() or typer.confirm("Submit it?", default=True, err=True)
    try:
        return typer.confirm("Submit it all the same?", default=False, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        note("")  # the question is still open on its line
        raise CliError("not submitted because of the warning above.", "--force submits it all the same.") from None


def _upload(api: Api, packed: Packed) -> None:
    path = api.in_project("archives", packed.sha256)
    if api.send("HEAD", path, accept=(404,)).is_success:
        return

    with _progress("Uploading") as progress:

        def chunks() -> Iterator[bytes]:
            packed.file.seek(0)
            while chunk := packed.file.read(CHUNK):
                yield chunk
                progress(packed.file.tell(), packed.size)

        headers = {"Content-Type": "application/gzip", "Content-Length": str(packed.size)}
        api.send("PUT", path, body=chunks, headers=headers)


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on stderr that vanishes when it is full; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _follow(api: Api, run: dict[str, Any]) -> int:
    note(f"Submitted {run['name']}. Ctrl-C leaves it running.")
    try:
        ended = Follower(api, Cursor(attempt=1)).follow(run)
    except KeyboardInterrupt:
        note(
            f"\nDetached; the run goes on.\n"
            f"  follow it: dstackweb logs -f {run['name']}\n"
            f"  stop it:   dstackweb stop {run['name']}"
        )
        return INTERRUPTED
    note(status_text(ended))
    return exit_code(ended)
