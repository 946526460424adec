"""`dstackweb apply`: show the plan, ask, upload the code, submit and follow."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import queue_names
from dstackweb.cli.offers import table as offer_table
from dstackweb.cli.output import (
    FAILED,
    INTERRUPTED,
    RED,
    ApiError,
    CliError,
    Column,
    Json,
    Painted,
    Quiet,
    UsageError,
    Yes,
    clean,
    clock_text,
    echo,
    note,
    paint,
    plural,
    show_answer,
    show_json,
    show_table,
    warn,
)
from dstackweb.cli.runs import status_text
from dstackweb.cli.sweeps import is_sweep
from dstackweb.spec.units import price_text, size_text

if TYPE_CHECKING:
    from dstackweb.cli.archive import CodeArchive
    from dstackweb.cli.client import Api

CHUNK = 1 << 16
OFFERS_SHOWN = 5
LINES_SHOWN = 8


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
    file: Annotated[Path, typer.Option("--file", "-f", help="The run file.")],
    name: Annotated[str | None, typer.Option(help="Name of the run; overrides the file.")] = None,
    priority: Annotated[int | None, typer.Option(help="0 to 100; higher starts first.")] = None,
    queue: Annotated[str | None, typer.Option(help="Queue to wait in.", autocompletion=queue_names)] = None,
    profile: Annotated[str | None, typer.Option(help="Profile with defaults for the file.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="K=V", help="Set a variable. A bare K copies your shell's value."),
    ] = None,
    yes: Yes = False,
    force: Annotated[bool, typer.Option("--force", help="Submit despite warnings.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Don't follow; print the run's name.")] = False,
    no_code: Annotated[bool, typer.Option("--no-code", help="Don't upload the current directory.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan without submitting.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the plan of a run, submit it with the code in the current directory, and follow it until it ends.

    Files that .gitignore excludes are not uploaded. Ctrl-C stops following; the run continues. The exit code is the
    run's. A sweep (a file with `array`) is not followed.
    """
    given = {"name": name, "priority": priority, "queue": queue, "profile": profile, "env": parse_env(env or [])}
    overrides = {key: value for key, value in given.items() if value not in (None, {})}
    if (as_json or quiet) and not detach and not (as_json and dry_run):
        raise UsageError(
            "--json and --quiet need --detach: a followed run prints its log. --json also takes --dry-run."
        )
    options = Options(file, overrides, not no_code, yes, force, detach, dry_run, as_json, quiet)
    raise typer.Exit(submit(config.connect(), options))


def submit(api: Api, options: Options) -> int:
    """Submit a run and follow it; returns the exit code, which is the run's if it was followed."""
    submitting = False
    try:
        limits = api.get(api.path("limits"))
        file = read(options.file, limits["config_bytes"])
        body = {"config": file.text, "env": file.env_from_here(), "overrides": options.overrides}
        plan = _post(api, file, "plan", body)
        archive = _pack(limits["archive_bytes"]) if options.code else None
        if options.as_json and options.dry_run:
            show_json(plan)
        elif options.yes and options.detach and not options.dry_run:
            show_position(plan, sys.stderr)  # as in a script that submits many runs: no full plan
        else:
            show_plan(plan, _code_text(archive, limits["archive_bytes"]), sys.stdout if options.dry_run else sys.stderr)
        for remark in plan["notes"]:
            note(clean(remark["message"]))
        if displaces := plan.get("displaces"):
            note(f"{clean(displaces['detail'])}.")
        for warning in plan["warnings"]:
            warn(clean(warning["message"]))
        if options.dry_run:
            note("Dry run: nothing was submitted.")
            return 0
        if not _is_confirmed(plan, options):
            note("Nothing was submitted.")
            return FAILED
        if archive:
            _upload(api, archive)
        submitting = True
        run = _post(api, file, "", {**body, "archive": archive.sha256 if archive else None})
    except (KeyboardInterrupt, typer.Abort):
        note(
            "\nInterrupted. The run may have been submitted: check with dstackweb ps."
            if submitting
            else "\nNothing was submitted."
        )
        return INTERRUPTED
    if is_sweep(run):
        note(
            f"Submitted sweep {run['name']} of {plural(run['size'], 'run')}. To watch: dstackweb sweep -w {run['name']}"
        )
        show_answer(run, run["name"], options.as_json, options.quiet)
        return 0
    if options.detach:
        note(f"Submitted {run['name']}. To follow: dstackweb logs -f {run['name']}")
        show_answer(run, run["name"], options.as_json, options.quiet)
        return 0
    return _follow(api, run)


def exit_code(run: dict[str, Any]) -> int:
    """The command's exit code: 0 only for a run that is done, else the run's, or 1 where it has none."""
    if run["status"] == "done":
        return 0
    return int(run["exit_code"] or 1)


def _post(api: Api, file: LocalRunFile, what: str, body: dict[str, Any]) -> dict[str, Any]:
    path = api.in_project("runs", *([what] if what else []))
    headers = {} if what else {"Idempotency-Key": str(uuid.uuid4())}
    try:
        answer: dict[str, Any] = api.post(path, body, headers=headers, repeatable=True)
        return answer
    except ApiError as refused:
        raise explain(refused, file) if refused.status == 422 else refused from None


def _pack(limit: int) -> CodeArchive:
    from dstackweb.cli.archive import pack

    with _progress("Packing") as progress:
        archive = pack(Path.cwd(), limit, progress)
    if archive.links_left_out:
        warn(f"links that point outside this directory are not uploaded: {', '.join(archive.links_left_out)}")
    return archive


def _code_text(archive: CodeArchive | None, limit: int) -> str:
    if archive is None:
        return "none (--no-code)"
    files = plural(archive.files, "file")
    return f"{files} in {Path.cwd()}, {size_text(archive.size)} packed (limit {size_text(limit)})"


def _is_confirmed(plan: dict[str, Any], options: Options) -> bool:
    """Ask if there is a warning, or at a terminal; a script without warnings needs no confirmation."""
    if options.force:
        return True
    if not plan["warnings"]:
        return options.yes or not sys.stdin.isatty() or typer.confirm("Submit?", default=True, err=True)
    try:
        return typer.confirm("Submit anyway?", default=False, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        note("")  # ends the line of the question
        raise CliError("nothing was submitted because of the warning above.", "To submit anyway: --force") from None


def _upload(api: Api, archive: CodeArchive) -> None:
    path = api.in_project("archives", archive.sha256)
    if api.send("HEAD", path, accept=(404,)).is_success:
        return

    with _progress("Uploading") as progress:

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


def _follow(api: Api, run: dict[str, Any]) -> int:
    from dstackweb.cli.logs import Cursor, Follower

    note(f"Submitted {run['name']}. Ctrl-C stops following; the run continues.")
    try:
        ended = Follower(api, Cursor(attempt=1)).follow(run)
    except KeyboardInterrupt:
        name = run["name"]
        note(f"\nThe run continues.\n  follow: dstackweb logs -f {name}\n  stop:   dstackweb stop {name}")
        return INTERRUPTED
    note(status_text(ended))
    return exit_code(ended)


def show_plan(plan: dict[str, Any], code: str, stream: IO[str]) -> None:
    """Write a plan to `stream`: settings with their sources, offers, and the position; `code` says what is uploaded."""
    show_table([Column("SETTING"), Column("VALUE", wide=True), Column("FROM")], settings_rows(plan), stream)
    echo(file=stream)
    if plan["offers"]:
        show_table(*offer_table(plan["offers"][:OFFERS_SHOWN], None, without=("", "WHY")), stream)
        if (more := len(plan["offers"]) - OFFERS_SHOWN) > 0:
            echo(f"and {plural(more, 'more offer')}", file=stream)
        echo(file=stream)
    if len(plan.get("backends", ())) > 1:
        show_table(
            [Column("BACKEND"), Column("START", wide=True), Column("PRICE/H", right=True)], _backends(plan), stream
        )
        echo(file=stream)
    echo(f"Code: {code}", file=stream)
    show_position(plan, stream)


def _backends(plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What each backend has for the run now, the best first."""
    return [
        (
            one["backend"],
            ("now" if one["starts"] else one["reason_detail"]) + ("" if one["used"] else " (not used)"),
            price_text(one["price"]) if one["price"] else "–",
        )
        for one in plan["backends"]
    ]


def show_position(plan: dict[str, Any], stream: IO[str]) -> None:
    """Write one line to `stream`: the position, and whether the run would wait there."""
    outcome = f"would wait: {clean(plan['reason_detail'])}" if plan["reason"] else "can start now"
    queue, at = f"queue {clean(plan['queue'])}", plan["next_at"]
    if plan.get("runs", 1) > 1:
        at_once = plan["settings"]["array"].get("max_parallel")
        echo(
            f"Sweep of {plural(plan['runs'], 'run')}" + (f", at most {at_once:,} at once" if at_once else ""),
            file=stream,
        )
    if plan.get("after_detail"):
        echo(clean(plan["after_detail"]), file=stream)
        return
    position = f"Enters {queue} at {clock_text(at)}" if at else f"Position {plan['position']} in {queue}"
    echo(f"{position}; {outcome}", file=stream)
    if share := plan.get("penalty_detail"):
        echo(f"Fair share: {share}", file=stream)


def settings_rows(plan: dict[str, Any], defaults: bool = True) -> list[tuple[str, str, str]]:
    """A row for each setting of a plan or a run that has a value; the lines of the commands have a row each.

    Without `defaults`, those that nobody set are left out.
    """
    rows = []
    for key, source in plan["provenance"].items():
        value = _value(plan["settings"], key)
        if value is None or (not defaults and source["source"] == "default"):
            continue
        first, *others = _lines(value) if key == "commands" else [_text(value)]
        rows.append((key, first, _origin(source)))
        rows += [("", line, "") for line in others[: LINES_SHOWN - 1]]
        if (more := len(others) - LINES_SHOWN + 1) > 0:
            rows.append(("", f"… and {plural(more, 'more line')}", ""))
    return rows


def _lines(commands: list[str]) -> list[str]:
    return [line for command in commands for line in command.splitlines() if line.strip()] or [""]


def _value(settings: dict[str, Any], key: str) -> Any:
    """The value of a key such as `resources.cpu`; None if it has none."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(value: Any) -> str:
    """A value on one line, in YAML's short form."""
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            return ", ".join(f"{name}: {_text(item)}" for name, item in value.items())
        case list():
            return f"[{', '.join(_text(item) for item in value)}]"
    return str(value)


def _origin(source: dict[str, Any]) -> str:
    match source:
        case {"source": "run_file", "line": int(line)}:
            return f"line {line}"
        case {"source": "profile", "profile": name}:
            return f"profile {name}"
        case {"source": str(name)}:
            return name.replace("_", " ")
    return ""


@dataclass(frozen=True)
class LocalRunFile:
    """A run file's name on the command line, and its text. Only the server validates the text."""

    name: str
    text: str

    def env_from_here(self) -> dict[str, str]:
        """The values that this process's environment has for the bare names in `env`."""
        import yaml

        try:
            data = yaml.load(self.text, Loader=yaml.BaseLoader)  # builds text, lists and mappings only
        except (yaml.YAMLError, RecursionError):
            return {}  # the server reports the error with its line
        listed = data.get("env") if isinstance(data, dict) else None
        names = [name.strip() for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        return {name: os.environ[name] for name in names if name in os.environ}


def read(path: Path, limit: int) -> LocalRunFile:
    """The run file at `path`. Raises CliError if it can't be read, exceeds `limit` bytes or is not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CliError(f"can't read {path}: {error.strerror}.") from None
    if len(data) > limit:
        raise CliError(f"{path} exceeds {size_text(limit)}, the limit for a run file. Nothing was sent.")
    try:
        return LocalRunFile(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise CliError(f"{path} is not valid UTF-8 (line {line}). Nothing was sent.") from None


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """The values of `-e K=V` options; a bare `K` is copied from this process's environment. Raises UsageError."""
    env = {}
    for pair in pairs:
        name, given, value = pair.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"-e {pair}: invalid variable name {name!r}.", "Write -e NAME=value.")
        if not given and name not in os.environ:
            raise UsageError(f"-e {name}: {name} is not set in your shell.", f"Write -e {name}=value, or export it.")
        env[name] = value if given else os.environ[name]
    return env


def explain(refused: ApiError, file: LocalRunFile) -> CliError:
    """A 422 in the form of compiler errors: each with its line of the file, and a caret below the key."""
    errors = refused.body.get("errors")
    places = [_place(error, file) for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
    if not places:
        return refused
    lines = (line for place in places for line in place)
    return CliError("the run is invalid. Nothing was submitted.", *lines)


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
    return "".join("\t" if c == "\t" else "  " if unicodedata.east_asian_width(c) in "WF" else " " for c in text)
