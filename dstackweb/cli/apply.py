"""`dstackweb apply`: show the plan, ask, upload the code, submit and follow."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import queue_names
from dstackweb.cli.language import _
from dstackweb.cli.output import (
    FAILED,
    INTERRUPTED,
    ApiError,
    CliError,
    Json,
    Quiet,
    UsageError,
    Yes,
    clean,
    echo,
    note,
    show_answer,
    show_ids,
    show_json,
    warn,
)
from dstackweb.cli.plan import plans_of, show_plans, show_positions
from dstackweb.cli.run_files import LocalRunFile, explain, parse_env, read
from dstackweb.cli.runs import status_text
from dstackweb.cli.sweeps import is_sweep
from dstackweb.cli.values import file_count, listed, run_count, size_text

if TYPE_CHECKING:
    from dstackweb.cli.archive import CodeArchive
    from dstackweb.cli.client import Api

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
    file: Annotated[Path, typer.Option("--file", "-f", help="The run file; - for stdin.")],
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


def submit(api: Api, options: Options) -> int:
    """Submit a run and follow it; returns the exit code, which is the run's if it was followed."""
    submitting = False
    try:
        limits = api.get(api.path("limits"))
        file = read(options.file, limits["config_bytes"])
        body = {"config": file.text, "env": file.env_from_here(), "overrides": options.overrides}
        plan = _post(api, file, "plan", body)
        plans = plans_of(plan)
        archive = _pack(limits["archive_bytes"]) if options.code else None
        if options.as_json and options.dry_run:
            show_json(plan)
        elif options.yes and options.detach and not options.dry_run:
            show_positions(plans, sys.stderr)  # as in a script that submits many runs: no full plan
        else:
            code = _code_text(archive, limits["archive_bytes"])
            show_plans(plans, code, sys.stdout if options.dry_run else sys.stderr)
        _show_remarks(plans)
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
        note(
            _(
                "Submitted sweep {name} of {runs}. To watch: dstackweb sweep -w {name}",
                name=run["name"],
                runs=run_count(run["size"]),
            )
        )
        show_answer(run, run["name"], options.as_json, options.quiet)
        return 0
    if options.detach:
        note(_("Submitted {name}. To follow: dstackweb logs -f {name}", name=run["name"]))
        show_answer(run, run["name"], options.as_json, options.quiet)
        return 0
    return _follow(api, run)


def _show_remarks(plans: list[dict[str, Any]]) -> None:
    """Notes and warnings on each run; with its name where there are several."""
    for plan in plans:
        name = plan["settings"].get("name") if len(plans) > 1 else None
        remarks = [clean(remark["message"]) for remark in plan["notes"]]
        if displaces := plan.get("displaces"):
            remarks.append(_("{sentence}.", sentence=clean(displaces["detail"])))
        for remark in remarks:
            note(f"{name}: {remark}" if name else remark)
        for warning in plan["warnings"]:
            message = clean(warning["message"])
            warn(f"{name}: {message}" if name else message)


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

    with _progress(_("Packing")) as progress:
        archive = pack(Path.cwd(), limit, progress)
    if archive.links_left_out:
        warn(
            _(
                "links that point outside this directory are not uploaded: {links}",
                links=listed(archive.links_left_out),
            )
        )
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


def _upload(api: Api, archive: CodeArchive) -> None:
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


def _follow(api: Api, run: dict[str, Any]) -> int:
    from dstackweb.cli.logs import Cursor, Follower

    note(_("Submitted {name}. Ctrl-C stops following; the run continues.", name=run["name"]))
    try:
        ended = Follower(api, Cursor(attempt=1)).follow(run)
    except KeyboardInterrupt:
        name = run["name"]
        note(_("\nThe run continues.\n  follow: dstackweb logs -f {name}\n  stop:   dstackweb stop {name}", name=name))
        return INTERRUPTED
    note(status_text(ended))
    return exit_code(ended)
