"""The `dstackweb` command. Modules that are slow to import are imported by the commands that need them."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import dstackweb
from dstackweb.cli import apply, config, hosts, logs, offers, progress, queue, runs, utilization
from dstackweb.cli.output import (
    INTERRUPTED,
    ChangeInterrupted,
    CliError,
    Column,
    UsageError,
    echo,
    note,
    show_error,
    show_table,
    warn,
)
from dstackweb.lib.network import is_exposed


class _Commands(TyperGroup):
    """Shows expected errors and turns them into exit codes, for all commands."""

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                # A character that the terminal can't show must not end a command that has made its change.
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except CliError as error:
            show_error(error)
            raise typer.Exit(error.code) from None
        except UnicodeEncodeError:
            show_error(UsageError("the command line is not valid UTF-8. Nothing was sent."))
            raise typer.Exit(UsageError.code) from None
        except (KeyboardInterrupt, typer.Abort) as stopped:
            # A prompt raises the same exception for Ctrl-C and for the end of its input.
            if isinstance(stopped, typer.Abort) and not isinstance(stopped.__context__, KeyboardInterrupt):
                raise
            if isinstance(stopped, ChangeInterrupted):
                note("\nInterrupted. The change may have been made: check before you try again.")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Submit runs to your team's shared GPUs, see the queue and why a run waits, follow logs.",
    epilog="Exit codes: 1 refused or failed, 2 usage error, 3 unreachable, 130 Ctrl-C. apply: the code of the run.",
)


@app.callback()
def show_help(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        echo(f"dstackweb {dstackweb.__version__}")
    elif ctx.invoked_subcommand is None:
        echo(ctx.get_help())
    else:
        return
    raise typer.Exit


@app.command(rich_help_panel="Account")
def login(
    url: Annotated[str, typer.Argument(metavar="URL", envvar="DSTACKWEB_URL", help="The server's URL.")] = "",
    token: Annotated[str, typer.Option(envvar="DSTACKWEB_TOKEN", help="API token; prompted for if not given.")] = "",
    project: Annotated[str, typer.Option(envvar="DSTACKWEB_PROJECT", help="Project that later commands use.")] = "",
) -> None:
    """Check an API token and save it for later commands."""
    from dstackweb.cli.client import Api

    url = config.normal_url(url or config.stored().get("url") or config.DEFAULT_URL)
    if is_exposed(url):
        warn(f"{url} is not encrypted: others on the network can read the token. Use https:// if you can.")
    if not token:
        if sys.stdin.isatty():
            note(f"Make a token on {config.tokens_page(url)}")
            token = typer.prompt("Token", hide_input=True, err=True)
        else:
            token = sys.stdin.readline()
    token = token.strip()
    if not config.is_token(token):
        raise UsageError("invalid API token. Nothing was saved.", f"Make a token on {config.tokens_page(url)}")
    api = Api(config.Settings(url, token, config.DEFAULT_PROJECT, ""))
    user = api.get(api.path("user"))
    names = [item["name"] for item in api.get(api.path("projects"))["items"]]
    chosen = _choose_project(project, names)
    path = config.store(url, token, chosen)
    echo(f"Logged in to {url} as {user['username']}, project {chosen}.")
    if len(names) > 1 and not project:
        note(f"Your projects: {', '.join(names)}. To use another one: --project, or DSTACKWEB_PROJECT.")
    note(f"Saved in {path}, readable by you only.")


def _choose_project(wanted: str, names: list[str]) -> str:
    if wanted and wanted not in names:
        raise CliError(
            f"there is no project {wanted}, or you are not a member of it. Nothing was saved.",
            f"Your projects: {', '.join(names) or 'none'}",
        )
    return wanted or (config.DEFAULT_PROJECT if config.DEFAULT_PROJECT in names or not names else names[0])


@app.command(rich_help_panel="Account")
def logout() -> None:
    """Delete the saved token."""
    if config.forget():
        echo(f"Logged out: deleted {config.config_path()}.")
        note("The token stays valid until you revoke it under Account → API tokens.")
    else:
        note("Not logged in.")


@app.command(rich_help_panel="Account")
def projects() -> None:
    """List your projects and your role in each."""
    api = config.connect()
    current = api.settings.project
    rows = [
        (item["name"], item["role"], "current" if item["name"] == current else "")
        for item in api.get(api.path("projects"))["items"]
    ]
    show_table([Column("PROJECT"), Column("ROLE"), Column("")], rows)


def version() -> None:
    """Print the version of this command."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        echo(f"dstackweb {installed('dstackweb')}")
    except PackageNotFoundError:
        echo("dstackweb, from a source tree that is not installed")


for panel, commands in {
    "Runs": (apply.apply, runs.ps, logs.logs, runs.stop, runs.delete, progress.progress, runs.hold, runs.extend),
    "Queue": (queue.queue, queue.move, runs.priority, runs.release, queue.history),
    "GPUs": (utilization.metrics, utilization.keep, utilization.what_if),
    "Hosts and clouds": (offers.offers, offers.quotas, offers.cache),
    "Account": (version,),
}.items():
    for command in commands:
        app.command(command.__name__.replace("_", "-"), rich_help_panel=panel)(command)
app.add_typer(hosts.app, name="host", rich_help_panel="Hosts and clouds")
