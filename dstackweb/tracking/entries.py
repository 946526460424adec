"""Pending entries and their JSON in a request. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

KEY_MAX, NAME_MAX, MESSAGE_MAX = 300, 200, 2000
"""Characters of a key, of a prefix or group name, and of a message that the server accepts."""

Entry = tuple[str, Any, tuple[Any, ...]]
"""The list of the request's body it belongs to, its key, and its values."""


def to_json(kind: str, key: Any, values: tuple[Any, ...]) -> dict[str, Any]:
    """An entry of the list `kind` of the request."""
    return _WRITERS[kind](key, *values)


def plain_text(name: object) -> str:
    """A name as a plain `str`: programs pass enum members, NumPy strings and numbers."""
    if type(name) is str:
        return name
    return str.__str__(name) if isinstance(name, str) else str(name)


def shorten_name(name: object, longest: int = NAME_MAX) -> str:
    """A name that the server accepts: not empty, at most `longest` characters, different for different names."""
    clean = _text(plain_text(name)) or "?"
    if len(clean) <= longest:
        return clean
    return f"{clean[: longest - 13]}…{hashlib.sha256(clean.encode()).hexdigest()[:12]}"


def _text(text: str) -> str:
    """Text that JSON and every database can store: no lone surrogates (as in odd file names), no NUL."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def _event(
    key: str, seq: int, state: str, prefix: str | None, group: str | None, duration_s: float | None, message: str
) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": shorten_name(key, KEY_MAX), "state": state, "seq": seq}
    if prefix:
        entry["prefix"] = shorten_name(prefix)
    if group:
        entry["group"] = shorten_name(group)
    if duration_s is not None:
        entry["duration_s"] = round(duration_s, 6)
    if message:
        entry["message"] = _text(message[:MESSAGE_MAX])
    return entry


def _count(
    place: tuple[str, str], seq: int, states: Mapping[str, int], duration_n: int, duration_s: float
) -> dict[str, Any]:
    names = {"prefix": shorten_name(place[0]), "group": shorten_name(place[1])}
    entry: dict[str, Any] = {**names, "seq": seq, "states": states}
    if duration_n:
        entry["duration_n"], entry["duration_s"] = duration_n, round(duration_s, 6)
    return entry


def _failure(key: str, seq: int, prefix: str, group: str, message: str) -> dict[str, Any]:
    names = {"key": shorten_name(key, KEY_MAX), "prefix": shorten_name(prefix), "group": shorten_name(group)}
    return {**names, "seq": seq, "message": _text(message[:MESSAGE_MAX])}


_WRITERS: dict[str, Callable[..., dict[str, Any]]] = {"events": _event, "counts": _count, "failures": _failure}
