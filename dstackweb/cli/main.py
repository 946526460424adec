"""The `dstackweb` command. Modules that are slow to import are imported by the commands that need them."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import dstackweb
from dstackweb.cli import (
    apply,
    artifacts,
    details,
    history,
    holds,
    hosts,
    logs,
    manual,
    moves,
    offers,
    progress,
    queue,
    runs,
    servers,
    sweeps,
    utilization,
)
from dstackweb.cli.language import _, choose
from dstackweb.cli.options import Commands, Project, Server, flag
from dstackweb.cli.output import GIVEN, INTERRUPTED, ChangeInterrupted, CliError, UsageError, echo, note, show_error


class _Program(TyperGroup):
    """Shows expected errors and turns them into exit codes, for all commands."""

    def main(self, *args: Any, **values: Any) -> Any:
        GIVEN.clear()
        choose()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                # A character that the terminal can't show must not end a command that has made its change.
                stream.reconfigure(errors="replace")
        return super().main(*args, **values)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CliError as error:
            show_error(error)
            raise typer.Exit(error.code) from None
        except UnicodeEncodeError:
            show_error(UsageError(_("the command line is not valid UTF-8. Nothing was sent.")))
            raise typer.Exit(UsageError.code) from None
        except (KeyboardInterrupt, typer.Abort) as stopped:
            # A prompt raises the same exception for Ctrl-C and for the end of its input.
            if isinstance(stopped, typer.Abort) and not isinstance(stopped.__context__, KeyboardInterrupt):
                raise
            if isinstance(stopped, ChangeInterrupted):
                note(_("\nInterrupted. The change may have been made: check before you try again."))
            raise typer.Exit(INTERRUPTED) from None


app = Commands(
    cls=_Program,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help=_("Submit runs to your team's shared GPUs, see the queue and why a run waits, follow logs."),
    epilog=_(manual.EPILOG),
)


@app.callback()
def show_help(
    ctx: typer.Context,
    version: Annotated[bool, flag("--version", help=_("Show the version and exit."))] = False,
    server: Server = "",
    project: Project = "",
) -> None:
    if version:
        echo(f"dstackweb {dstackweb.__version__}")
    elif ctx.invoked_subcommand is None:
        echo(ctx.get_help())
    else:
        return
    raise typer.Exit


def version() -> None:
    """Print the version of this command."""
    from importlib.metadata import PackageNotFoundError, version as installed

    try:
        echo(f"dstackweb {installed('dstackweb')}")
    except PackageNotFoundError:
        echo(_("dstackweb, from a source tree that is not installed"))


for panel, commands in {
    _("Runs"): (
        apply.apply,
        runs.ps,
        sweeps.sweep,
        details.show,
        logs.logs,
        artifacts.artifacts,
        details.diff,
        progress.progress,
        runs.stop,
        sweeps.retry,
        runs.delete,
        holds.ssh,
        holds.hold,
        holds.extend,
    ),
    _("Queue"): (queue.queue, moves.move, runs.priority, runs.release, history.history),
    _("GPUs"): (utilization.metrics, utilization.keep, utilization.what_if, history.usage),
    _("Hosts and clouds"): (offers.offers, offers.quotas, offers.cache),
    _("Servers"): (servers.login, servers.logout, servers.projects, version),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel, is_local=command is version)(command)
app.add_typer(queue.views_app, rich_help_panel=_("Queue"))
app.add_typer(hosts.app, rich_help_panel=_("Hosts and clouds"))
app.add_typer(holds.keys_app, rich_help_panel=_("Servers"))
app.add_typer(servers.app, rich_help_panel=_("Servers"))
