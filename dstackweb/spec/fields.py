"""The building blocks of the run file's models. Error messages and docs/run-file.md use the same text for a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf

from dstackweb.lib.language import gettext as _
from dstackweb.spec.units import Range, parse_count, parse_duration, parse_memory, parse_range, positive

MOST_NAMES, MAX_NAME = 100, 100
"""Names in a list, and the characters of one: they are compared with every offer, and shown beside each run."""


class Keys(BaseModel):
    """A mapping with known keys; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def key(expects: str, description: str, *, default: Any = ..., **constraints: Any) -> Any:
    """A key of a mapping: `expects` completes "`name` should be …"."""
    return Field(default, description=description, json_schema_extra={"expects": expects}, **constraints)


def optional(expects: str, description: str, **constraints: Any) -> Any:
    """A key that is None where it is missing."""
    return key(expects, description, default=None, **constraints)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError(_("the text is empty"))
    return text


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(values))
    if len(found) > MOST_NAMES or any(len(name) > MAX_NAME for name in found):
        raise ValueError(
            _("it has more than %(most_names)s names, or one with more than %(max_name)s characters")
            % {"most_names": MOST_NAMES, "max_name": MAX_NAME}
        )
    return found


def read_text(parse: Callable[[str], Any]) -> BeforeValidator:
    """Reads text and numbers with `parse`; other types are left to pydantic's check."""

    def read(value: Any) -> Any:
        return parse(str(value)) if isinstance(value, str | int | float) and not isinstance(value, bool) else value

    return BeforeValidator(read)


def readable(parse: Callable[[Any], Any]) -> AfterValidator:
    """Keeps a value as it is, if `parse` reads it without a ValueError."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


def _off(value: Any) -> Any:
    return None if value == "off" or value is False else value


Text = Annotated[str, AfterValidator(_not_blank)]
Names = Annotated[tuple[Text, ...], Field(min_length=1), AfterValidator(_distinct)]
Seconds = Annotated[int, Field(strict=True), read_text(parse_duration)]
SecondsOrOff = Annotated[Annotated[Seconds, Field(ge=1)] | None, BeforeValidator(_off)]
Cores = Annotated[InstanceOf[Range], read_text(lambda text: positive(parse_range(text, parse_count)))]
Memory = Annotated[InstanceOf[Range], read_text(lambda text: positive(parse_range(text, parse_memory)))]
Count = Annotated[InstanceOf[Range], read_text(lambda text: parse_range(text, parse_count))]
