"""How commands are declared: the options that many have, and groups whose help is in the user's language."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from dstackweb.cli import completion, manual
from dstackweb.cli.language import _
from dstackweb.cli.output import ACTIVE, ENDED, GIVEN, UsageError, clean

Function = TypeVar("Function", bound=Callable[..., Any])
COMMANDS: dict[str, Callable[..., Any]] = {}
"""The function of each command by its name: `ps`, `host list`."""


def flag(*names: str, help: str, callback: Callable[..., Any] | None = None) -> Any:
    """Declare an option without a value; its help names no type."""
    return typer.Option(*names, metavar="", help=help, callback=callback)


def one_form(param: typer.CallbackParam, value: bool) -> bool:
    """Refuse a second form of output with UsageError."""
    if value:
        form = param.opts[0]
        if GIVEN.setdefault("form", form) != form:
            raise UsageError(_("{one} can't be combined with {other}.", one=form, other=GIVEN["form"]))
        if form == "--watch" and not sys.stdout.isatty():
            raise UsageError(_("--watch needs a terminal."))
    return value


def known_statuses(values: list[str] | None) -> list[str]:
    """Read the statuses of a repeated option, each with several between commas. Raises UsageError."""
    statuses = [status.strip() for value in values or () for status in value.split(",") if status.strip()]
    allowed = (*ACTIVE, *ENDED)
    for status in statuses:
        if status not in allowed:
            raise UsageError(_("{value} is not one of {values}.", value=repr(clean(status)), values=", ".join(allowed)))
    return statuses


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help=_("The run's name (the newest run of that name) or id."),
        autocompletion=completion.run_names,
    ),
]
Json = Annotated[bool, flag("--json", help=_("Print the API's answer as JSON."), callback=one_form)]
Quiet = Annotated[
    bool,
    flag("--quiet", "-q", help=_("Print only ids, one a line; names where there are no ids."), callback=one_form),
]
Yes = Annotated[bool, flag("--yes", "-y", help=_("Don't ask for confirmation."))]
Watch = Annotated[bool, flag("--watch", "-w", help=_("Update until Ctrl-C."), callback=one_form)]


def _store_value(param: typer.CallbackParam, value: str) -> str:
    """Store the value as soon as it is read: names are completed while later words are still missing."""
    if value and param.name:
        GIVEN[param.name] = value
    return value


def _where(name: str, help: str, names: completion.Completion) -> Any:
    return typer.Option(
        name, metavar="NAME", help=help, autocompletion=names, callback=_store_value, show_default=False,
        rich_help_panel=_("Where"),
    )  # fmt: skip


Server = Annotated[
    str,
    _where(
        "--server",
        _("A saved server (dstackweb servers list); not the one of the environment."),
        completion.server_names,
    ),
]
Project = Annotated[str, _where("--project", _("Another project than the saved one."), completion.project_names)]
WHERE = {"server": Server, "project": Project}
"""The options of all commands that talk to a server. Their values are in GIVEN."""


class Commands(typer.Typer):
    """A group of commands. What they declare is shown in the user's language, with examples below."""

    def __init__(self, name: str = "", *, help: str, **values: Any) -> None:
        super().__init__(
            name=name or None,
            help=help,
            rich_markup_mode="markdown",
            context_settings={"help_option_names": ["-h", "--help"]},
            **values,
        )
        self.path = f"{name} " if name else ""

    def command(
        self, name: str | None = None, *, is_local: bool = False, **values: Any
    ) -> Callable[[Function], Function]:
        """Register a function as a command. An `is_local` one uses no saved server, or names one."""

        def register(function: Function) -> Function:
            command = name or function.__name__.replace("_", "-")
            path = self.path + command
            COMMANDS[path] = function
            about = inspect.getdoc(function) or ""
            values.update(help=_(about), epilog=manual.epilog(path))
            super(Commands, self).command(command, **values)(function if is_local else _with_where(function))
            return function

        return register


def _with_where(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of WHERE to those of the function."""
    signature = inspect.signature(function, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=annotation)
        for name, annotation in WHERE.items()
        if name not in signature.parameters
    ]

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        for option in added:
            del values[option.name]
        return function(**values)

    # inspect.signature, and so typer, takes this for the function's own.
    vars(command)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *added])
    return command
