"""`dstackweb apply`: read the run file, show the plan, ask, upload the code, submit and follow."""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import queue_names
from dstackweb.cli.language import _, file_count, listed, run_count, size_text
from dstackweb.cli.options import Json, Quiet, Yes, flag
from dstackweb.cli.output import (
    FAILED,
    INTERRUPTED,
    RED,
    ApiError,
    CliError,
    Painted,
    UsageError,
    clean,
    echo,
    note,
    paint,
    show_answer,
    show_ids,
    show_json,
    warn,
)
from dstackweb.cli.plan import plans_of, positions, remarks, view_of
from dstackweb.cli.runs import status_text
from dstackweb.cli.sweeps import is_sweep
from dstackweb.cli.tables import cells_of, show_view

if TYPE_CHECKING:
    from dstackweb.cli.archive import CodeArchive


CHUNK = 1 << 16


@dataclass(frozen=True)
class Options:
    """The command line. `overrides` are keys of the run file; `yes` skips the question, `force` warnings too."""

    file: Path
    overrides: dict[str, Any]
    code: bool
    yes: bool
    force: bool
    detach: bool
    dry_run: bool
    as_json: bool
    quiet: bool


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help=_("The run file; - for stdin."))],
    name: Annotated[str | None, typer.Option(metavar="TEXT", help=_("Name of the run; overrides the file."))] = None,
    priority: Annotated[int | None, typer.Option(metavar="N", help=_("0 to 100; higher starts first."))] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="TEXT", help=_("Queue to wait in."), autocompletion=queue_names)
    ] = None,
    profile: Annotated[str | None, typer.Option(metavar="TEXT", help=_("Profile with defaults for the file."))] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="K=V", help=_("Set a variable. A bare K copies your shell's value.")),
    ] = None,
    yes: Yes = False,
    force: Annotated[bool, flag("--force", help=_("Submit despite warnings."))] = False,
    detach: Annotated[bool, flag("--detach", "-d", help=_("Don't follow; print the run's name."))] = False,
    no_code: Annotated[bool, flag("--no-code", help=_("Don't upload the current directory."))] = False,
    dry_run: Annotated[bool, flag("--dry-run", help=_("Show the plan without submitting."))] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the plan of a run, submit it with the code in the current directory, and follow it until it ends.

    Files that .gitignore excludes are not uploaded. Ctrl-C stops following; the run continues. The exit code is the
    run's. A sweep (a file with `array`) and a file with several runs are not followed.
    """
    given = {"name": name, "priority": priority, "queue": queue, "profile": profile, "env": parse_env(env or [])}
    overrides = {key: value for key, value in given.items() if value not in (None, {})}
    if (as_json or quiet) and not detach and not (as_json and dry_run):
        raise UsageError(
            _("--json and --quiet need --detach: a followed run prints its log. --json also takes --dry-run.")
        )
    options = Options(file, overrides, not no_code, yes, force, detach, dry_run, as_json, quiet)
    raise typer.Exit(submit(config.connect(), options))


def submit(api: config.Api, options: Options) -> int:
    """Submit a run and follow it; returns the exit code, which is the run's if it was followed."""
    submitting = False
    try:
        limits = api.get(api.path("limits"))
        file = read_file(options.file, limits["config_bytes"])
        body = {"config": file.text, "env": file.env_from_here(), "overrides": options.overrides}
        plan = _post(api, file, "plan", body)
        plans = plans_of(plan)
        archive = _pack(limits["archive_bytes"]) if options.code else None
        if options.as_json and options.dry_run:
            show_json(plan)
        elif options.yes and options.detach and not options.dry_run:
            show_view(positions(plans), sys.stderr)  # as in a script that submits many runs: no full plan
        else:
            code = _code_text(archive, limits["archive_bytes"])
            show_view(view_of(plans, code), sys.stdout if options.dry_run else sys.stderr)
        show_view(remarks(plans))
        if options.dry_run:
            note(_("Dry run: nothing was submitted."))
            return 0
        if not _is_confirmed(plans, options):
            note(_("Nothing was submitted."))
            return FAILED
        if archive:
            _upload(api, archive)
        submitting = True
        run = _post(api, file, "", {**body, "archive": archive.sha256 if archive else None})
    except (KeyboardInterrupt, typer.Abort):
        note(
            _("\nInterrupted. The run may have been submitted: check with dstackweb ps.")
            if submitting
            else _("\nNothing was submitted.")
        )
        return INTERRUPTED
    if run.get("type") == "pipeline":
        _show_pipeline(run, options)
        return 0
    if is_sweep(run):
        values = {"name": run["name"], "runs": run_count(run["size"])}
        note(_("Submitted sweep {name} of {runs}. To watch: dstackweb sweep -w {name}", **values))
    elif options.detach:
        note(_("Submitted {name}. To follow: dstackweb logs -f {name}", name=run["name"]))
    else:
        return _follow(api, run)
    show_answer(run, run["name"], options.as_json, options.quiet)
    return 0


def _show_pipeline(pipeline: dict[str, Any], options: Options) -> None:
    runs = pipeline["runs"]
    names = [clean(run["name"]) for run in runs]
    note(_("Submitted {runs}: {names}. To watch: dstackweb ps -w", runs=run_count(len(runs)), names=listed(names)))
    if options.as_json:
        show_json(pipeline)
    elif options.quiet:
        show_ids(runs)
    else:
        for name in names:
            echo(name)


def _post(api: config.Api, file: LocalRunFile, what: str, body: dict[str, Any]) -> dict[str, Any]:
    path = api.in_project("runs", *([what] if what else []))
    headers = {} if what else {"Idempotency-Key": str(uuid.uuid4())}
    try:
        return api.post(path, body, headers=headers, repeatable=True)
    except ApiError as refused:
        raise explain(refused, file) if refused.status == 422 else refused from None


def _pack(limit: int) -> CodeArchive:
    from dstackweb.cli.archive import pack

    with _progress(_("Packing")) as progress:
        archive = pack(Path.cwd(), limit, progress)
    if archive.links_left_out:
        links = listed(archive.links_left_out)
        warn(_("links that point outside this directory are not uploaded: {links}", links=links))
    return archive


def _code_text(archive: CodeArchive | None, limit: int) -> str:
    if archive is None:
        return _("none (--no-code)")
    return _(
        "{files} in {folder}, {size} packed (limit {limit})",
        files=file_count(archive.files),
        folder=Path.cwd(),
        size=size_text(archive.size),
        limit=size_text(limit),
    )


def _is_confirmed(plans: list[dict[str, Any]], options: Options) -> bool:
    """Ask if there is a warning, or at a terminal; a script without warnings needs no confirmation."""
    if options.force:
        return True
    if not any(plan["warnings"] for plan in plans):
        return options.yes or not sys.stdin.isatty() or typer.confirm(_("Submit?"), default=True, err=True)
    try:
        return typer.confirm(_("Submit anyway?"), default=False, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        note("")  # ends the line of the question
        raise CliError(
            _("nothing was submitted because of the warning above."), _("To submit anyway: --force")
        ) from None


def _upload(api: config.Api, archive: CodeArchive) -> None:
    path = api.in_project("archives", archive.sha256)
    if api.send("HEAD", path, accept=(404,)).is_success:
        return

    with _progress(_("Uploading")) as progress:

        def chunks() -> Iterator[bytes]:
            archive.file.seek(0)
            while chunk := archive.file.read(CHUNK):
                yield chunk
                progress(archive.file.tell(), archive.size)

        headers = {"Content-Type": "application/gzip", "Content-Length": str(archive.size)}
        api.send("PUT", path, body=chunks, headers=headers)


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of bytes on stderr, removed at the end; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _follow(api: config.Api, run: dict[str, Any]) -> int:
    from dstackweb.cli.logs import Cursor, Follower

    note(_("Submitted {name}. Ctrl-C stops following; the run continues.", name=run["name"]))
    try:
        ended = Follower(api, Cursor(attempt=1)).follow(run)
    except KeyboardInterrupt:
        name = run["name"]
        note(_("\nThe run continues.\n  follow: dstackweb logs -f {name}\n  stop:   dstackweb stop {name}", name=name))
        return INTERRUPTED
    note(status_text(ended))
    return 0 if ended["status"] == "done" else int(ended["exit_code"] or 1)


@dataclass(frozen=True)
class LocalRunFile:
    """A run file's name on the command line, and its text. Only the server validates the text."""

    name: str
    text: str

    def env_from_here(self) -> dict[str, str]:
        """The values that this process's environment has for the bare names in `env` of each run."""
        import yaml

        try:
            runs = list(yaml.load_all(self.text, Loader=yaml.BaseLoader))  # builds text, lists and mappings only
        except (yaml.YAMLError, RecursionError):
            return {}  # the server reports the error with its line
        listed = [run["env"] for run in runs if isinstance(run, dict) and isinstance(run.get("env"), list)]
        names = [name.strip() for env in listed for name in env if isinstance(name, str)]
        return {name: os.environ[name] for name in names if name in os.environ}


def read_file(path: Path, limit: int) -> LocalRunFile:
    """The run file at `path`; `-` is standard input. Raises CliError if it can't be read, exceeds `limit` bytes or is
    not UTF-8."""
    try:
        if path == Path("-"):
            path, data = Path("stdin"), sys.stdin.buffer.read(limit + 1)
        else:
            with path.open("rb") as file:
                data = file.read(limit + 1)
    except OSError as error:
        raise CliError(_("can't read {file}: {reason}.", file=path, reason=error.strerror)) from None
    if len(data) > limit:
        raise CliError(
            _("{file} exceeds {limit}, the limit for a run file. Nothing was sent.", file=path, limit=size_text(limit))
        )
    try:
        return LocalRunFile(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise CliError(_("{file} is not valid UTF-8 (line {line}). Nothing was sent.", file=path, line=line)) from None


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """The values of `-e K=V` options; a bare `K` is copied from this process's environment. Raises UsageError."""
    env = {}
    for pair in pairs:
        name, given, value = pair.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                _("-e {pair}: invalid variable name {name!r}.", pair=pair, name=name), _("Write -e NAME=value.")
            )
        if not given and name not in os.environ:
            raise UsageError(
                _("-e {name}: {name} is not set in your shell.", name=name),
                _("Write -e {name}=value, or export it.", name=name),
            )
        env[name] = value if given else os.environ[name]
    return env


def explain(refused: ApiError, file: LocalRunFile) -> CliError:
    """A 422 in the form of compiler errors: each with its line of the file, and a caret below the key."""
    errors = refused.body.get("errors")
    places = [_place(error, file) for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
    if not places:
        return refused
    lines = (line for place in places for line in place)
    return CliError(_("the run is invalid. Nothing was submitted."), *lines)


def _place(error: dict[str, Any], file: LocalRunFile) -> list[str]:
    loc = [part for part in error.get("loc") or [] if isinstance(part, str)]
    message, line = clean(error.get("msg")), error.get("line")
    lines = file.text.splitlines()
    if not isinstance(line, int) or not 0 < line <= len(lines):
        return [f"{'.'.join(loc)}: {message}" if loc else message]
    source = lines[line - 1]
    column, width = _span(source, error.get("col"), loc)
    gutter = " " * len(str(line))
    pointer = _blank(source[:column]) + paint("^" * width, RED, sys.stderr)
    return [
        f"{gutter}--> {file.name}:{line}:{column + 1}",
        f"{gutter} |",
        f"{line} | {_printable(source)}",
        Painted(f"{gutter} | {pointer} {message}"),
    ]


def _span(source: str, col: object, loc: list[str]) -> tuple[int, int]:
    """Start (from 0) and width of the caret: the word at `col`, else the innermost key on the line."""
    if not isinstance(col, int) or not 0 < col <= len(source):
        found = (re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", source) for key in reversed(loc))
        first = next((match for match in found if match), re.search(r"[^\s-]\S*", source))
        return (first.start(), first.end() - first.start()) if first else (0, 1)
    word = re.match(r"[\w.-]+", source[col - 1 :])
    return col - 1, len(word[0]) if word else 1


def _printable(text: str) -> str:
    return "".join(char if char == "\t" or char.isprintable() else "\ufffd" for char in text)


def _blank(text: str) -> str:
    """Blanks as wide as `text` on a terminal."""
    return "".join("\t" if char == "\t" else " " * cells_of(char) for char in text)
