"""The `env` key: a mapping, or a list in which a bare name is copied from the client's shell. Its values may refer to
secrets: `${{ secrets.NAME }}`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dstackweb.lib.errors import Invalid
from dstackweb.lib.language import gettext as _

OURS = ("DSTACK_", "DSTACKWEB_")
RESERVED = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Set by the runner for every job; the file must not override it."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_REFERENCE = re.compile(r"\$\{\{\s*secrets\.([A-Za-z_][A-Za-z0-9_]*)\s*\}\}", re.ASCII)
_ANY = re.compile(r"\$\{\{.*?(?:\}\}|\Z)", re.DOTALL)
_OF_SECRETS = re.compile(r"\$\{\{\s*secrets\.")


MAX_VALUE, MAX_ENV = 128 * 1024 - 1, 256 * 1024
"""Bytes of one `NAME=value`, which is the kernel's limit, and of all of a run, with its secrets."""
SECRET_MIN = 8
COMMON = frozenset(
    {
        "12345678", "123456789", "1234567890", "abcdefgh", "changeme", "development", "localhost", "passw0rd",
        "password", "password1", "postgres", "production", "qwertyuiop", "secret123", "undefined", "username",
    }
)  # fmt: skip
"""Of SECRET_MIN characters or more; shorter ones are weak anyway."""


class EnvError(ValueError):
    """An invalid entry at `key`: its name, or its index in a list."""

    def __init__(self, key: str | int, msg: str) -> None:
        super().__init__(msg)
        self.key = key


def read_env(value: Any) -> Any:
    """Text by name; None for a bare name in a list. Other types are left to pydantic's check.

    Raises EnvError.
    """
    if isinstance(value, dict):
        return {name: _check(name, name, _text(name, given)) for name, given in value.items()}
    if not isinstance(value, list):
        return value
    found: dict[str, str | None] = {}
    for index, entry in enumerate(value):
        if not isinstance(entry, str):
            raise EnvError(index, _("should be NAME=value or a bare NAME"))
        name, equals, text = entry.partition("=")
        name = name.strip()
        if name in found:
            raise EnvError(index, _("%(name)s is given twice") % {"name": name})
        found[name] = _check(index, name, text if equals else None)
    return found


def _text(name: str, value: Any) -> str:
    match value:
        case str():
            return value
        case bool() | int() | float():
            return json.dumps(value)
        case None:
            raise EnvError(name, _('has no value; write "" for an empty value'))
    raise EnvError(name, _("should be text or a number"))


def _check(key: str | int, name: str, value: str | None) -> str | None:
    if not _NAME.fullmatch(name):
        raise EnvError(
            key,
            _("%(name)s is not a valid variable name: use letters, digits, underscores; no digit first")
            % {"name": repr(name)},
        )
    if name in RESERVED or name.startswith(OURS):
        raise EnvError(key, _("%(name)s is set by dstackweb; remove it") % {"name": name})
    for reference in bad_references(value or ""):
        raise EnvError(
            key, _("%(reference)s is not supported; only ${{ secrets.NAME }} is") % {"reference": reference[:100]}
        )
    return value


def secret_names(env: Mapping[str, str]) -> set[str]:
    """The project secrets that an environment refers to."""
    return {name for value in env.values() for name in _REFERENCE.findall(value)}


def fill_secrets(env: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """The environment with all references replaced. Raises Invalid with the names of missing secrets."""
    missing = sorted(secret_names(env) - set(secrets))
    if missing:
        raise Invalid.at("env", msg=_("the project has no secret %(missing)s") % {"missing": ", ".join(missing)})
    texts = env.values()
    plain = sum(len(key) + len(_REFERENCE.sub("", value)) for key, value in env.items())
    if plain + sum(len(secrets[name]) for text in texts for name in _REFERENCE.findall(text)) > MAX_ENV:
        raise Invalid.at("env", msg=too_large(_("all values with their secrets"), MAX_ENV))
    filled = {key: _REFERENCE.sub(lambda found: secrets[found[1]], value) for key, value in env.items()}
    try:
        check_sizes(filled)
    except EnvError as error:
        raise Invalid.at("env", error.key, msg=str(error)) from None
    return filled


def too_large(what: str, limit: int) -> str:
    """The error for a value, or all of them."""
    return _("`env` has more than %(size)s KB in %(what)s; pass large data in files") % {
        "size": (limit + 1) // 1024,
        "what": what,
    }


def check_sizes(env: Mapping[str, str]) -> None:
    """Raises EnvError for values that are too large, together or one by one."""
    sizes = {name: len(f"{name}={value}".encode(errors="replace")) for name, value in env.items()}
    for name, size in sizes.items():
        if size > MAX_VALUE:
            raise EnvError(name, too_large(name, MAX_VALUE))
    if sum(sizes.values()) > MAX_ENV:
        raise EnvError("", too_large(_("all values"), MAX_ENV))


def bad_references(value: str) -> Iterator[str]:
    """The `${{ … }}` in an `env` value that don't refer to a secret."""
    return (found for found in _ANY.findall(value) if not _REFERENCE.fullmatch(found))


def is_weak(value: str) -> bool:
    """Whether a secret is so short, or so common, that masking it in a log would hide other text, or hide nothing."""
    text = value.strip().lower()
    return len(text) < SECRET_MIN or len(set(text)) < 3 or text in COMMON


def refers_to_secret(text: str) -> bool:
    """Whether a text refers to a secret; only in `env` is it filled in."""
    return bool(_OF_SECRETS.search(text))
