"""The commands of `dstackweb`. What takes long to import is imported by the command that needs it."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dstackweb.cli import config, history, hold, hosts, metrics, moves, offers, progress, queue, quotas, utilization
from dstackweb.cli.errors import INTERRUPTED, CliError, Interrupted, Refused, UsageError
from dstackweb.cli.output import Column, age_text, note, show_error, show_json, show_table, warn

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

ACTIVE = ("pending", "submitted", "provisioning", "running", "terminating")


class _Commands(TyperGroup):
    """Words expected faults and turns them into exit codes, for all commands in one place."""

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                # What a terminal's encoding doesn't have must not end a command that has made its change.
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except CliError as error:
            show_error(error)
            raise typer.Exit(error.code) from None
        except UnicodeEncodeError:
            show_error(UsageError("a word of the command line is no UTF-8 text; nothing was sent."))
            raise typer.Exit(UsageError.code) from None
        except (KeyboardInterrupt, typer.Abort) as stopped:
            # A prompt turns Ctrl-C, and the end of its input, into the same exception.
            if isinstance(stopped, typer.Abort) and not isinstance(stopped.__context__, KeyboardInterrupt):
                raise
            if isinstance(stopped, Interrupted):
                note("\nInterrupted: it isn't known whether the change was made. Look before you try again.")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Submit runs to a team's shared GPUs, see the queue and why a run waits, follow logs.",
    epilog="Exit codes: 1 refused or failed, 2 usage, 3 server out of reach; apply exits with the run's own code.",
)

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name (the newest of it) or id.")]
Json = Annotated[bool, typer.Option("--json", help="As the API gives it, for scripts.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


def _connect() -> Api:
    from dstackweb.cli.client import Api

    return Api(config.load())


@app.command()
def login(
    url: Annotated[str, typer.Argument(metavar="[URL]", envvar="DSTACKWEB_URL", help="The server's address.")] = "",
    token: Annotated[str, typer.Option(envvar="DSTACKWEB_TOKEN", help="Asked for, unseen, when not given.")] = "",
    project: Annotated[str, typer.Option(envvar="DSTACKWEB_PROJECT", help="Where later commands work.")] = "",
) -> None:
    """Check a token and keep it for later commands."""
    from dstackweb.cli.client import BASE, Api

    url = config.normal_url(url or config.stored().get("url") or config.DEFAULT_URL)
    if config.is_exposed(url):
        warn(f"{url} is not encrypted: whoever is on the way can read the token. Use https:// if the server has it.")
    if not token:
        if sys.stdin.isatty():
            note(f"Make a token: {config.tokens_page(url)}")
            token = typer.prompt("Token", hide_input=True, err=True)
        else:
            token = sys.stdin.readline()
    token = token.strip()
    if not config.is_token(token):
        raise UsageError("that is no API token; nothing was stored.", f"Make one: {config.tokens_page(url)}")
    api = Api(config.Settings(url, token, config.DEFAULT_PROJECT, ""))
    user = api.get(f"{BASE}/user")
    names = [item["name"] for item in api.get(f"{BASE}/projects")["items"]]
    chosen = _choose_project(project, names)
    path = config.store(url, token, chosen)
    typer.echo(f"Logged in to {url} as {user['username']}, project {chosen}.")
    if len(names) > 1 and not project:
        note(f"Your projects: {', '.join(names)}. Another one: --project, or DSTACKWEB_PROJECT.")
    note(f"Stored in {path}, readable by you alone.")


def _choose_project(wanted: str, names: list[str]) -> str:
    if wanted and wanted not in names:
        raise CliError(
            f"no project is called {wanted}, or you are not a member of it; nothing was stored.",
            f"Your projects: {', '.join(names) or 'none yet'}",
        )
    return wanted or (config.DEFAULT_PROJECT if config.DEFAULT_PROJECT in names or not names else names[0])


@app.command()
def logout() -> None:
    """Forget the stored token."""
    if config.forget():
        typer.echo(f"Logged out: {config.config_path()} is gone.")
        note("The token itself works until it is revoked, under Account → API tokens.")
    else:
        note("Nobody was logged in.")


@app.command()
def projects() -> None:
    """List your projects and your role in each."""
    from dstackweb.cli.client import BASE

    api = _connect()
    current = api.settings.project
    rows = [
        (item["name"], item["role"], "current" if item["name"] == current else "")
        for item in api.get(f"{BASE}/projects")["items"]
    ]
    show_table([Column("PROJECT"), Column("ROLE"), Column("")], rows)


@app.command()
def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="The run file.")],
    name: Annotated[str | None, typer.Option(help="Instead of the file's name.")] = None,
    priority: Annotated[int | None, typer.Option(help="0 to 100; higher goes first.")] = None,
    queue: Annotated[str | None, typer.Option(help="The queue to wait in.")] = None,
    profile: Annotated[str | None, typer.Option(help="The profile that fills in what the file leaves out.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Set a variable; K alone takes it from here.")
    ] = None,
    yes: Yes = False,
    force: Annotated[bool, typer.Option("--force", help="Submit in spite of warnings.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Don't follow; print the run's name.")] = False,
    no_code: Annotated[bool, typer.Option("--no-code", help="Don't ship the current directory.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and submit nothing.")] = False,
) -> None:
    """Show the plan of a run, submit it with the current directory's code, and follow it to its end.

    Files that .gitignore names stay here. Ctrl-C detaches; the run goes on. Exits with the run's exit code.
    """
    from dstackweb.cli.runfile import parse_env
    from dstackweb.cli.submit import Options
    from dstackweb.cli.submit import apply as submit

    given = {"name": name, "priority": priority, "queue": queue, "profile": profile, "env": parse_env(env or [])}
    overrides = {key: value for key, value in given.items() if value not in (None, {})}
    options = Options(file, overrides, not no_code, yes, force, detach, dry_run)
    raise typer.Exit(submit(_connect(), options))


app.command()(hold.hold)
app.command()(hold.extend)
app.command()(history.history)
app.command()(metrics.metrics)
app.command()(progress.progress)
app.command()(utilization.keep)
app.command("what-if")(utilization.what_if)
app.command()(offers.offers)
app.command()(quotas.quotas)
app.command()(quotas.cache)
app.add_typer(hosts.app, name="host")


@app.command()
def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Ended runs, too.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many at most.")] = 50,
    as_json: Json = False,
) -> None:
    """List the project's runs, newest first."""
    api = _connect()
    page = api.get(api.in_project("runs"), status=None if everything else ACTIVE, limit=limit)
    if as_json:
        show_json(page)
        return
    if not page["items"]:
        note("No runs yet: dstackweb apply -f FILE" if everything else "No active runs; ended ones: dstackweb ps -a")
        return
    columns = [Column("NAME"), Column("STATUS"), Column("PRIO", right=True), Column("USER"), Column("AGE", right=True)]
    rows = [
        (*(run[key] for key in ("name", "status", "priority", "user")), age_text(run["submitted_at"]), *_told(run))
        for run in page["items"]
    ]
    show_table([*columns, Column("WHERE", wide=True), Column("MESSAGE", wide=True)], rows)
    if page["next"]:
        note(f"The newest {len(rows)}; more with --limit.")


def _told(run: dict[str, Any]) -> tuple[str, str]:
    """Where a run is, if anywhere, and what there is to say of it."""
    from dstackweb.cli.logs import remark

    return run.get("where") or "", remark(run)


app.command()(queue.queue)
app.command()(moves.move)


@app.command()
def priority(
    run: RunName,
    value: Annotated[int, typer.Argument(metavar="N", help="0 to 100; higher goes first.")],
) -> None:
    """Change a run's priority, and with it its place in the queue."""
    api = _connect()
    path = api.in_project("runs", run)
    seen = api.send("GET", path)
    before = api.json(seen)
    try:
        # Only what was just seen is changed: nobody's edit in between is overwritten unseen.
        answer = api.send("PATCH", path, json={"priority": value}, headers={"If-Match": seen.headers["ETag"]})
    except Refused as refused:
        if refused.status != 412:
            raise
        raise CliError(refused.message, f"To set it all the same: dstackweb priority {run} {value}") from None
    after = api.json(answer)
    told = f"{after['name']}: priority {before['priority']} → {after['priority']}"
    if after["position"]:
        told += f", position {before['position'] or '–'} → {after['position']} of {after['queue']}"
    typer.echo(told)


@app.command()
def stop(
    run: RunName,
    abort: Annotated[bool, typer.Option("--abort", help="Kill at once, without the run's stop_duration.")] = False,
    yes: Yes = False,
) -> None:
    """Stop a run: TERM, then KILL after its stop_duration."""
    api = _connect()
    found = api.get(api.in_project("runs", run))
    question = f"{'Kill' if abort else 'Stop'} {found['name']} of {found['user']} ({found['status']})?"
    if found["spec"].get("schedule"):
        question += " Its schedule ends with it."
    if not yes and sys.stdin.isatty() and not typer.confirm(question, err=True):
        note("It goes on.")
        raise typer.Exit(1)
    # By id: between the question and the answer a newer run may have taken the name.
    stopped = api.json(api.send("POST", api.in_project("runs", found["id"], "stop"), json={"abort": abort}))
    typer.echo(f"{stopped['name']}: {stopped['status']}")
    if found["spec"].get("schedule"):
        note("Its schedule has ended: submit it again to have it come round.")


@app.command()
def logs(
    run: RunName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    node: Annotated[int, typer.Option(min=0, help="Which node of a multi-node run.")] = 0,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which attempt, instead of the newest.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, max=100_000, metavar="N", help="Only the last N lines.")] = None,
) -> None:
    """Write a run's output, stdout and stderr together, byte for byte."""
    from dstackweb.cli.logs import Cursor, Follower, print_log, status_text, to_stdout

    api = _connect()
    found = api.get(api.in_project("runs", run))
    if node >= found["spec"]["nodes"]:
        raise UsageError(f"{found['name']} has no node {node}: it has {found['spec']['nodes']}, counted from 0.")
    cursor = Cursor(node=node, attempt=attempt, tail=tail)
    if follow:
        try:
            ended = Follower(api, cursor, only=attempt is not None).follow(found)
        except KeyboardInterrupt:
            note(f"\n{found['name']} goes on without being followed.")
            raise typer.Exit(INTERRUPTED) from None
        note(status_text(ended))
    elif not print_log(api, found["id"], cursor, to_stdout):
        note(f"No output yet. {status_text(found)}" if not cursor.complete else "It wrote no output.")


@app.command()
def version() -> None:
    """Print the version of this command."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        typer.echo(f"dstackweb {installed('dstackweb')}")
    except PackageNotFoundError:
        typer.echo("dstackweb, from a source tree that isn't installed")
