"""What people read, in their language, Simplified Chinese or English: texts, times, amounts and codes. What programs
read stays English. Also line breaks in Chinese, and the errors of the option parser, which it can't translate itself.

A text is marked where it stands: `_("Stopped {name}.", name=…)`, and `_n` where it counts. `N_` marks a text that is
translated later, where it is shown. `python -m tools.cli_messages` writes the catalogue below `locale/`.
"""

from __future__ import annotations

import gettext
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dstackweb.spec import units

if TYPE_CHECKING:
    from rich.text import Text


ENGLISH, CHINESE = "en", "zh_Hans"
DOMAIN = "dstackweb"
LOCALE = Path(__file__).parent / "locale"
VARIABLES = ("DSTACKWEB_LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
"""The first of these that is set decides."""
_CHINESE = re.compile(r"zh(_(cn|sg|my|hans)(_\w+)?)?", re.IGNORECASE)

_language = ENGLISH


def language_of(environ: Mapping[str, str]) -> str:
    """`zh_Hans` for `zh_CN.UTF-8`, `zh_SG`, `zh-Hans` …; English for anything else."""
    name = next((value for key in VARIABLES if (value := environ.get(key))), "")
    return CHINESE if _CHINESE.fullmatch(re.split("[.@]", name)[0].replace("-", "_")) else ENGLISH


def choose() -> str:
    """Speak the language of the environment from now on; English where the terminal's encoding has no Chinese."""
    global _language
    _language = language_of(os.environ)
    try:
        "中文".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        _language = ENGLISH
    if _language != ENGLISH:
        # The option parser's own texts are in the catalogue too. It looks them up in gettext's current domain.
        gettext.bindtextdomain(DOMAIN, str(LOCALE))
        gettext.textdomain(DOMAIN)
        os.environ["LANGUAGE"] = _language
    elif gettext.textdomain() == DOMAIN:
        gettext.textdomain("messages")
        os.environ.pop("LANGUAGE", None)
    return _language


def language() -> str:
    return _language


def tag() -> str:
    """The language as HTTP names it."""
    return _language.replace("_", "-")


@cache
def _catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation(DOMAIN, LOCALE, [language], fallback=True)


def _(text: str, /, **values: Any) -> str:
    """The text in the chosen language, with the values that it names."""
    found = _catalogue(_language).gettext(text) if text else ""
    return found.format(**values) if values else found


def _n(one: str, many: str, n: int, /, **values: Any) -> str:
    """The form of a text for a number, which it names `{n}` or `{n:,}`."""
    return _catalogue(_language).ngettext(one, many, n).format(n=n, **values)


def _p(context: str, text: str, /) -> str:
    """The text in the sense that the context names: a word that two things have may need two words elsewhere."""
    return _catalogue(_language).pgettext(context, text)


def N_(text: str) -> str:
    """Marks a text that `_` translates where it is shown."""
    return text


HAN = "\u2e80-\u9fff\uf900-\ufaff\uff01-\uff60"
OPENING, CLOSING = "“（《「『", "”，。、：；？！）》」』…"


def wrap_chinese() -> None:
    """Have rich break lines between the characters of Chinese, which has no blanks between words, if it is spoken."""
    if language() != ENGLISH:
        from rich import _wrap
        from rich.text import Text

        # What stays on one line: a Chinese character or a word of another script, with the punctuation beside it.
        _wrap.re_word = re.compile(rf"\s*[{OPENING}]*(?:[{HAN}]|[^\s{HAN}]+)[{CLOSING}]*\s*")
        Text.rstrip_end = _rstrip_end  # type: ignore[assignment,method-assign]  # rich has no option for it


def _rstrip_end(line: Text, width: int) -> None:
    """Remove blanks at the end of a line that is too wide. rich's own counts characters, not their cells."""
    blanks = len(line.plain) - len(line.plain.rstrip())
    if (excess := min(blanks, line.cell_len - width)) > 0:
        line.right_crop(excess)


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
    for pattern, text in TEXTS.items():
        if found := re.fullmatch(pattern, message, re.DOTALL):
            parts = found.groupdict()
            if "reason" in parts:
                parts["reason"] = translated(parts["reason"])
            return _(text, **parts)
    return message


@contextmanager
def parser_errors() -> Iterator[None]:
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
            wrap_chinese()

        def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
            super().write_usage(prog, args, prefix or _("Usage: "))

    context.formatter_class = Formatter


SPANS = {"d": N_("{n} d"), "h": N_("{n} h"), "min": N_("{n} min"), "s": N_("{n} s")}
WORDS = (
    N_("pending"), N_("submitted"), N_("provisioning"), N_("running"), N_("terminating"), N_("done"), N_("failed"),
    N_("terminated"), N_("idle"), N_("available"), N_("busy"), N_("unknown"), N_("no_quota"), N_("not_available"),
    N_("default"), N_("viewer"), N_("member"), N_("manager"), N_("admin"), N_("ended"), N_("waiting"),
    N_("met"), N_("unmet"), N_("released"), N_("starting"), N_("healthy"), N_("unhealthy"),
)  # fmt: skip
"""Codes of the API that people read: statuses, availabilities, origins, roles, why runs wait, health."""


def word(code: object) -> str:
    """A code of the API as people read it; one that is not in WORDS, as it is."""
    text = "" if code is None else str(code)
    return _(text) if text in WORDS else text


def duration_text(seconds: float) -> str:
    """`12 s`, `4 min`, `1 h 30 min`: see `spec.units.duration_text`."""
    return " ".join(_(SPANS[unit], n=n) for n, unit in units.duration_parts(seconds))


def size_text(size: float) -> str:
    """`17 bytes`, `3.4 MB`: see `spec.units.size_text`."""
    return _n("{n} byte", "{n} bytes", round(size)) if round(size) < 1024 else units.size_text(size)


def run_count(n: int) -> str:
    return _n("{n:,} run", "{n:,} runs", n)


def gpu_count(n: int) -> str:
    return _n("{n:,} GPU", "{n:,} GPUs", n)


def job_count(n: int) -> str:
    return _n("{n:,} job", "{n:,} jobs", n)


def file_count(n: int) -> str:
    return _n("{n:,} file", "{n:,} files", n)


def listed(items: list[str]) -> str:
    """The items with commas between them."""
    return _(", ").join(items)


def clock_text(at: str, now: datetime | None = None) -> str:
    """An ISO time in the reader's time zone: `18:40` today, otherwise with its day: `Nov 6, 02:00`."""
    then, today = datetime.fromisoformat(at).astimezone(), (now or datetime.now(UTC)).astimezone()
    return f"{then:%H:%M}" if then.date() == today.date() else _("{at:%b} {at.day}, {at:%H:%M}", at=then)


def start_text(starts: dict[str, Any] | None) -> str:
    """When a run starts: `14:05 – 15:30`, `by 18:00`, or why that is unknown; empty for a run that does not wait."""
    if not starts:
        return ""
    if not starts["p50"]:
        return str(starts["detail"])
    from_, by = clock_text(starts["p50"]), clock_text(starts["p90"]) if starts["p90"] else "?"
    if from_ != by:
        return f"{from_} – {by}"
    return _("by {time}", time=by) if starts["basis"] == "max_duration" else by


def age_text(since: str | None) -> str:
    """How long ago an ISO time was: `12 s`, `1 h 5 min`. Empty without a time."""
    if not since:
        return ""
    return duration_text((datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds())
