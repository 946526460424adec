"""How codes and names are worded: tables of words, sentences whose moments stay apart from their text, labels."""

from __future__ import annotations

import datetime as dt
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from django.utils import timezone
from django.utils.translation import get_language, gettext as _

from dstackweb.lib.text import JOINERS


class Sentence(str):
    """Text that keeps its moments in `parts`, so that pages show them in the reader's time zone.

    As a string they are in UTC, with the day where it isn't today.
    """

    parts: tuple[str | dt.datetime, ...]

    def __new__(cls, *parts: str | dt.datetime) -> Sentence:
        flat = tuple(each for part in parts for each in (part.parts if isinstance(part, Sentence) else (part,)) if each)
        made = super().__new__(cls, "".join(part if isinstance(part, str) else moment(part) for part in flat))
        made.parts = flat
        return made

    def __add__(self, other: str) -> Sentence:
        return Sentence(self, other)

    def __radd__(self, other: str) -> Sentence:
        return Sentence(other, self)

    def capitalized(self) -> Sentence:
        """With its first letter in upper case in languages that write so; the rest stays."""
        first, *rest = self.parts or ("",)
        return Sentence(capitalized(first) if isinstance(first, str) else first, *rest)


def fill(template: str, **values: Any) -> Sentence:
    """`template % values`; moments and sentences among the values keep their parts."""
    kept = {name: value for name, value in values.items() if isinstance(value, dt.datetime | Sentence)}
    texts = {name: f"\0{name}\0" if name in kept else _clean(value) for name, value in values.items()}
    pieces = (template % texts).split("\0")
    return Sentence(*(kept[piece] if place % 2 else piece for place, piece in enumerate(pieces)))


def _clean(value: Any) -> Any:
    return value.replace("\0", "") if isinstance(value, str) else value


def capitalized(text: str) -> str:
    """With its first letter in upper case, in languages that write so; names such as `gpu-box-1` stay."""
    first = text.partition(" ")[0]
    if not first.rstrip(",;.:").replace("’", "").replace("'", "").isalpha() or (get_language() or "").startswith("zh"):
        return text
    return text[:1].upper() + text[1:]


def listing(names: Iterable[str]) -> str:
    """`ann, bob, mia`: names and short parts, as the reader's language separates them."""
    return _(", ").join(names)


def colon(text: str, more: str) -> str:
    """`Exit code 127: command not found`."""
    return text + _(": ") + more


def clauses(parts: Iterable[str]) -> str:
    """`paused; ageing: 30 min`: parts that have commas or verbs of their own."""
    return _("; ").join(parts)


def enumeration(names: Sequence[str]) -> str:
    """`ann`, `ann and bob`, `ann, bob and mia`."""
    return _(" and ").join(filter(None, (_(", ").join(names[:-1]), *names[-1:])))


def joined(separator: str, sentences: Iterable[str]) -> Sentence:
    """Like `separator.join`."""
    parts: list[str] = []
    for each in sentences:
        parts += [separator, each]
    return Sentence(*parts[1:])


def moment(at: dt.datetime) -> str:
    """`18:40 UTC`, with the day where it isn't today."""
    at = at.astimezone(dt.UTC)
    return f"{at:%H:%M} UTC" if at.date() == timezone.now().astimezone(dt.UTC).date() else f"{at:%Y-%m-%d %H:%M} UTC"


class Label(NamedTuple):
    """A short word for a badge, a sentence to go beside it, and a tone: `go`, `wait`, `bad` or `info`."""

    label: str
    text: str
    tone: str = "wait"


Code = TypeVar("Code", bound=Enum)


def known(codes: type[Code], code: str) -> Code | None:
    """The member for a stored code; None for one that another version of the server wrote."""
    return codes(code) if code in codes._value2member_map_ else None


def as_text(code: str) -> str:
    return code.replace("_", " ")


def words(texts: Mapping[Any, Any]) -> Callable[[str], str]:
    """A function from a code of one or several catalogues to its words, and from any other to `as_text`.

    The texts are lazy translations. Raises LookupError, when its module is imported, if a code has none.
    """
    for codes in {type(code) for code in texts}:
        if missing := [code.name for code in codes if code not in texts]:
            raise LookupError(f"no words for {codes.__name__} {', '.join(missing)}")
    of_value = {code.value: text for code, text in texts.items()}

    def word(code: str) -> str:
        return str(of_value[code]) if code in of_value else as_text(code)

    return word


def visible(name: str) -> str:
    """A name whose characters all show: spaces at its ends as `␣`, controls and marks of direction by their number."""
    body = name.strip()
    if body.strip(JOINERS) == "":
        body = ""
    if body:
        start = name.index(body)
        before, after = name[:start], name[start + len(body) :]
    else:
        before, after = name, ""
    shown = "".join(char if _shows(char) else _number(char) for char in body)
    return "".join(map(_blank, before)) + shown + "".join(map(_blank, after)) or "␣"


def _shows(char: str) -> bool:
    return (
        char == " " or char in JOINERS or unicodedata.category(char) not in ("Cc", "Cf", "Cn", "Co", "Zl", "Zp", "Zs")
    )


def _blank(char: str) -> str:
    return "␣" if char == " " else _number(char)


def _number(char: str) -> str:
    """`␊` for a line break, `[U+202E]` for characters without a picture."""
    code = ord(char)
    return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"
