"""The `dstackweb` command. Modules that are slow to import are imported by the commands that need them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

import dstackweb
from dstackweb.cli import (
    apply,
    artifacts,
    completion,
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
from dstackweb.cli.language import _, choose, parser_errors, translate_usage
from dstackweb.cli.output import GIVEN, INTERRUPTED, ChangeInterrupted, CliError, UsageError, echo, note, show_error

HELP = ["-h", "--help"]
METAVARS = {
    "<bool>": "", "<int>": "N", "<int range>": "N", "<float>": "N", "<str>": "TEXT", "<list[str]>": "TEXT",
    "<path>": "FILE",
}  # fmt: skip
"""What help texts say instead of the names of types."""
EVERYWHERE = ("server", "project")
"""The options of `dstackweb` itself that its commands have too."""
LOCAL = {
    "version", "host join", "host run",
    "servers list", "servers ls", "servers add", "servers use", "servers remove",
}  # fmt: skip
"""Commands that use no saved server, or name one."""


class _Commands(TyperGroup):
    """Shows expected errors and turns them into exit codes, for all commands; completes their options and help."""

    def __init__(self, **values: Any) -> None:
        choose()
        translate_usage(self.context_class)
        super().__init__(**values)
        shared = [option for option in self.params if option.name in EVERYWHERE]
        for path, command in _leaves(self.commands.items()):
            if path not in LOCAL:
                mine = {option.name for option in command.params}
                command.params += [option for option in shared if option.name not in mine]
            command.epilog = manual.epilog(path)
        self.epilog = _(manual.EPILOG)
        for _path, command in _leaves([("", self)], with_groups=True):
            context = typer.Context(command, help_option_names=HELP)
            options = (*command.params, command.get_help_option(context))
            _declare(context, command, *options)

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        _declare(ctx, *params)  # those that were added later, too
        return params

    def main(self, *args: Any, **values: Any) -> Any:
        GIVEN.clear()
        choose()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                # A character that the terminal can't show must not end a command that has made its change.
                stream.reconfigure(errors="replace")
        return super().main(*args, **values)

    def make_context(self, *args: Any, **values: Any) -> Any:
        with parser_errors():
            return super().make_context(*args, **values)

    def invoke(self, ctx: Any) -> Any:
        try:
            with parser_errors():
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


def _no_type(ctx: object) -> None:
    """What help texts say of the type of an argument: its name and text are enough."""


def _bare(argument: TyperArgument, ctx: object) -> list[str]:
    """How the line of usage names an argument that is required: not in braces, which elsewhere mean a choice."""
    return [argument.display_name_raw + ("..." if argument.nargs != 1 else "")]


def _declare(context: Any, *owners: Any) -> None:
    """Set the metavars of options, and the texts of commands and options in the user's language."""
    for owner in owners:
        if isinstance(owner, TyperOption) and owner.metavar is None:
            owner.metavar = METAVARS.get(owner.display_type(context))
        elif isinstance(owner, TyperArgument):
            owner.display_type_rich = _no_type  # type: ignore[method-assign]  # typer has no option for it
            if owner.required:
                owner.get_usage_pieces = partial(_bare, owner)  # type: ignore[method-assign]  # nor for braces
    for owner, attribute, text in manual.texts(*owners):
        setattr(owner, attribute, _(text))


def _leaves(
    commands: Iterable[tuple[str, Any]], path: str = "", with_groups: bool = False
) -> Iterator[tuple[str, Any]]:
    """The commands with their names, also those of groups: `host list`."""
    for name, command in commands:
        is_group = isinstance(command, TyperGroup)
        if with_groups or not is_group:
            yield f"{path}{name}", command
        if is_group:
            yield from _leaves(command.commands.items(), f"{path}{name} ".lstrip(), with_groups)


app = typer.Typer(
    cls=_Commands,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": HELP},
    help="Submit runs to your team's shared GPUs, see the queue and why a run waits, follow logs.",
)


def _given(param: typer.CallbackParam, value: str) -> str:
    if value and param.name:
        GIVEN[param.name] = value
    return value


def _where(name: str, about: str, names: Any) -> Any:
    """An option of all commands, in `GIVEN` where it is given."""
    return typer.Option(
        name, metavar="NAME", help=about, autocompletion=names, callback=_given, expose_value=False,
        show_default=False, rich_help_panel="Where",
    )  # fmt: skip


@app.callback()
def show_help(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    server: Annotated[
        str,
        _where(
            "--server",
            "A saved server (dstackweb servers list); not the one of the environment.",
            completion.server_names,
        ),
    ] = "",
    project: Annotated[str, _where("--project", "Another project than the saved one.", completion.project_names)] = "",
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
    "Runs": (
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
    "Queue": (queue.queue, moves.move, runs.priority, runs.release, history.history),
    "GPUs": (utilization.metrics, utilization.keep, utilization.what_if, history.usage),
    "Hosts and clouds": (offers.offers, offers.quotas, offers.cache),
    "Servers": (servers.login, servers.logout, servers.projects, version),
}.items():
    for command in commands:
        app.command(command.__name__.replace("_", "-"), rich_help_panel=panel)(command)
app.add_typer(queue.views_app, name="view", rich_help_panel="Queue")
app.add_typer(hosts.app, name="host", rich_help_panel="Hosts and clouds")
app.add_typer(holds.keys_app, name="key", rich_help_panel="Servers")
app.add_typer(servers.app, name="servers", rich_help_panel="Servers")
