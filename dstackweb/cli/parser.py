"""The option parser's errors in the user's language. It has English texts for them, and no way to translate these."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from dstackweb.cli import wrapping
from dstackweb.cli.language import ENGLISH, N_, _, language

ParserError: Any = typer.BadParameter.__base__
"""The command line is wrong."""
TEXTS = {
    r"Missing option (?P<name>[^.]+)\.": N_("Missing option {name}."),
    r"Missing argument (?P<name>[^.]+)\.": N_("Missing argument {name}."),
    r"No such option: (?P<name>\S+) \(Possible options: (?P<names>.+)\)": N_(
        "No such option: {name} (possible options: {names})"
    ),
    r"No such option: (?P<name>\S+)": N_("No such option: {name}"),
    r".*?(?P<name>'[^']+').* Did you mean (?P<names>.+)\?": N_("No such command {name}. Did you mean {names}?"),
    r"No such command (?P<name>\S+)\.": N_("No such command {name}."),
    r"Got unexpected extra argument\(s\) \((?P<names>.*)\)": N_("Got unexpected extra arguments ({names})"),
    r"Option (?P<name>.+) requires an argument\.": N_("Option {name} requires a value."),
    r"Option (?P<name>.+) does not take a value\.": N_("Option {name} does not take a value."),
    r"Invalid value for (?P<name>.+?): (?P<reason>.+)": N_("Invalid value for {name}: {reason}"),
    r"Input should be a valid integer\b.*": N_("it must be a whole number."),
    r"Input should be greater than or equal to (?P<least>\S+)": N_("it must be at least {least}."),
    r"Input should be less than or equal to (?P<most>\S+)": N_("it must be at most {most}."),
    r"Value error, (?P<value>.+) is not one of (?P<values>.+)\.": N_("{value} is not one of {values}."),
}
"""The parser's texts as patterns, each with what is said instead."""


def translated(message: str) -> str:
    """An error of the parser in the chosen language; one that is not known stays."""
    for pattern, text in TEXTS.items():
        if found := re.fullmatch(pattern, message, re.DOTALL):
            parts = found.groupdict()
            if "reason" in parts:
                parts["reason"] = translated(parts["reason"])
            return _(text, **parts)
    return message


@contextmanager
def errors() -> Iterator[None]:
    """Have errors of the parser say what they say in the chosen language."""
    try:
        yield
    except ParserError as error:
        text = translated(error.format_message())
        error.format_message = lambda: text
        raise


def translate_usage(context: Any) -> None:
    """Have the help texts of a class of contexts begin with the word for usage in the chosen language."""
    formatter = context.formatter_class
    if language() == ENGLISH or formatter.__module__ == __name__:
        return

    class Formatter(formatter):  # type: ignore[misc,valid-type]  # the class that the parser has at run time
        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            wrapping.use()

        def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
            super().write_usage(prog, args, prefix or _("Usage: "))

    context.formatter_class = Formatter
