"""Typed readers for settings from the environment.

Each reader takes the variable's name and default, records both in `READ` (a test compares docs/settings.md with it),
and raises `BadSetting` with the name, the value and what was expected. An empty variable counts as not set.
The file DSTACKWEB_ENV_FILE, if there is one, has further variables; those of the environment win.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

from dstackweb.lib.network import is_loopback

T = TypeVar("T")

READ: dict[str, str] = {}
"""Every variable read so far, with its default as text."""
FILE = "DSTACKWEB_ENV_FILE"
GIVEN: dict[str, str] = {}
"""The environment without the file's variables, for a program that is to read the file again."""

_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


class BadSetting(ImproperlyConfigured):
    """An invalid setting; its message is one line for the person who starts the program."""

    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"{name}={_without_password(value)!r}: expected {expected}")
        self.name = name


def load_file() -> None:
    """Put the variables of DSTACKWEB_ENV_FILE into the environment.

    Lines are `NAME=value`, as for systemd and compose; quotes around a value, empty lines and `# comments` are dropped.
    """
    GIVEN.update(os.environ)
    place = text(FILE)
    if not place:
        return
    try:
        lines = Path(place).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise BadSetting(FILE, place, "a file of settings that this program can read") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith(("#", ";")):
            continue
        name, is_there, value = line.partition("=")
        if not is_there or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise BadSetting(FILE, place, f"NAME=value in line {number}")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        os.environ.setdefault(name, value)


def _without_password(value: str) -> str:
    return re.sub(r"(://[^:/@]*:)[^@]*@", r"\1***@", value)


def _read(
    name: str, default: T, parse: Callable[[str], T], expected: str, is_valid: Callable[[T], object] = lambda _: True
) -> T:
    READ[name] = "" if default is None else str(default)
    raw = os.environ.get(name, "").strip()
    if not raw:
        return default
    try:
        value = parse(raw)
        if not is_valid(value):
            raise ValueError(raw)
    except ValueError:
        raise BadSetting(name, raw, expected) from None
    return value


def text(name: str, default: str = "", *, pattern: str = "", expected: str = "text") -> str:
    """A string; with `pattern` it must match completely, and `expected` describes it."""
    return _read(name, default, str, expected, lambda raw: not pattern or re.fullmatch(pattern, raw))


def secret(name: str) -> str:
    """A string whose value never appears in an error."""
    return _read(name, "", str, "text")


def integer(name: str, default: int, *, least: int = 0, most: int = 2**31 - 1) -> int:
    """A whole number from `least` to `most`."""
    expected = f"a whole number from {least} to {most}"
    return _read(name, default, int, expected, lambda number: least <= number <= most)


def seconds(name: str, default: float, *, least: float = 0, most: float = 30 * 86400) -> float:
    """A duration in seconds, greater than zero, from `least` to `most`; fractions are allowed."""
    bounds = f"from {least:g} to {most:g}" if least else "above 0, at most 30 days"
    expected = f"a number of seconds {bounds}"
    return _read(name, default, float, expected, lambda number: 0 < number <= most and number >= least)


def boolean(name: str, default: bool = False) -> bool:
    """1/true/yes/on or 0/false/no/off, in any case."""
    expected = "1, true, yes or on; or 0, false, no or off"
    given: bool | None = default
    return bool(_read(name, given, lambda raw: _BOOLEANS.get(raw.lower()), expected, lambda value: value is not None))


def path(name: str, default: Path) -> Path:
    """An absolute path; a relative one starts at the current directory, and `~` is the home directory."""
    return _read(name, default, lambda raw: Path(raw).expanduser().absolute(), "a path")


def url(name: str, *schemes: str, example: str) -> str:
    """An absolute URL with one of `schemes`, without a trailing slash; empty if not set. It may have a password."""

    def is_valid(raw: str) -> bool:
        parts = urlsplit(raw)
        return parts.scheme in schemes and bool(parts.netloc or parts.path.strip("/"))

    return _read(name, "", lambda raw: raw.rstrip("/"), f"a URL such as {example}", is_valid)


class Mailer(NamedTuple):
    """How mails are sent: encrypted, unless the mail server is on this machine. `url` is empty where it is not set."""

    url: str = ""
    host: str = ""
    port: int = 587
    user: str = ""
    password: str = ""
    tls_at_once: bool = False
    starttls: bool = False
    sender: str = "dstackweb@localhost"


def mailer(name: str) -> Mailer:
    """A mail server as `smtp://user:password@host:port?from=address`, or `smtps`."""

    def parse(raw: str) -> Mailer:
        parts = urlsplit(raw)
        host, sender = parts.hostname or "", dict(parse_qsl(parts.query)).get("from", "")
        if parts.scheme not in ("smtp", "smtps") or not host or "@" not in sender:
            raise ValueError(raw)
        at_once = parts.scheme == "smtps"
        return Mailer(
            url=raw,
            host=host,
            port=parts.port or (465 if at_once else 587),
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            tls_at_once=at_once,
            starttls=not at_once and not is_loopback(host),
            sender=sender,
        )

    found = _read(name, None, parse, "a URL such as smtp://user:password@mail.example.org?from=gpus@example.org")
    return found or Mailer()


class GroupRole(NamedTuple):
    """A role in a project that members of a group of the identity provider have."""

    group: str
    project: str
    role: str


ROLES = ("viewer", "member", "manager", "admin")


def group_roles(name: str) -> list[GroupRole]:
    """Roles by group as `group=project:role`, separated by commas; empty when not set."""

    def parse(raw: str) -> list[GroupRole]:
        found = []
        for word in _words(raw):
            group, _, place = word.rpartition("=")
            project, _, role = place.partition(":")
            if not group or not re.fullmatch(r"[-\w]{1,60}", project, re.ASCII) or role not in ROLES:
                raise ValueError(word)
            found.append(GroupRole(group.strip(), project, role))
        return found

    return _read(name, [], parse, f"group=project:role,…, such as ml-team=main:member; roles are {', '.join(ROLES)}")


def numbers(name: str, *, least: float, most: float, example: str) -> dict[str, float]:
    """Numbers by name as `name=number`, separated by commas; empty when not set."""

    def parse(raw: str) -> dict[str, float]:
        pairs = (word.partition("=") for word in _words(raw))
        return {key.strip(): float(number) for key, _, number in pairs}

    expected = f"name=number,…, such as {example}; numbers are from {least:g} to {most:g}"
    return _read(name, {}, parse, expected, lambda found: all(least <= number <= most for number in found.values()))


def issuer(name: str) -> str:
    """The address of an OpenID Connect provider: HTTPS, or HTTP on this machine alone."""
    found = url(name, "https", "http", example="https://login.example.org/realms/team")
    if found.startswith("http:") and not is_loopback(urlsplit(found).hostname or ""):
        raise BadSetting(name, found, "a URL with https, or one of this machine")
    return found


def networks(name: str) -> list[IPv4Network | IPv6Network]:
    """Addresses and networks, separated by commas; empty when not set."""
    expected = "addresses or networks such as 127.0.0.1,10.0.0.0/8"
    return _read(name, [], lambda raw: [ip_network(word) for word in _words(raw)], expected)


def words(name: str) -> list[str]:
    """A list separated by commas; empty when not set."""
    return _read(name, [], _words, "a list such as a,b,c")


def folders(name: str) -> list[str]:
    """Absolute paths separated by commas; empty when not set."""
    expected = "absolute paths such as /data,/scratch"
    return _read(name, [], _words, expected, lambda paths: all(map(os.path.isabs, paths)))


def _words(raw: str) -> list[str]:
    return [word.strip() for word in raw.split(",") if word.strip()]
