"""What is told, as it is kept, and as it stands in a request. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

KEY_MAX, NAME_MAX, MESSAGE_MAX = 300, 200, 2000
"""Characters of a key, of a prefix or a group, and of a message, that the server takes."""

Entry = tuple[str, Any, tuple[Any, ...]]
"""Which list of the request's body it belongs to, its key, and what was told."""


def written(kind: str, key: Any, told: tuple[Any, ...]) -> dict[str, Any]:
    """An entry of the request's list `kind`."""
    return _WRITERS[kind](key, *told)


def plain(name: object) -> str:
    """A name as nothing but text, whatever a program has for one: members of an enum, NumPy's strings, numbers."""
    if type(name) is str:
        return name
    return str.__str__(name) if isinstance(name, str) else str(name)


def fitting(name: object, longest: int = NAME_MAX) -> str:
    """A name that the server can hold: no longer than it allows, different names still different, never empty."""
    clean = _text(plain(name)) or "?"
    if len(clean) <= longest:
        return clean
    return f"{clean[: longest - 13]}…{hashlib.sha256(clean.encode()).hexdigest()[:12]}"


def _text(text: str) -> str:
    """What JSON and every database can hold: no halves of characters (as in odd file names), no NUL."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def _event(
    key: str, state: str, seq: int, prefix: str | None, group: str | None, duration_s: float | None, message: str
) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": fitting(key, KEY_MAX), "state": state, "seq": seq}
    if prefix:
        entry["prefix"] = fitting(prefix)
    if group:
        entry["group"] = fitting(group)
    if duration_s is not None:
        entry["duration_s"] = round(duration_s, 6)
    if message:
        entry["message"] = _text(message[:MESSAGE_MAX])
    return entry


def _count(
    place: tuple[str, str], states: Mapping[str, int], seq: int, duration_n: int, duration_s: float
) -> dict[str, Any]:
    entry: dict[str, Any] = {"prefix": fitting(place[0]), "group": fitting(place[1]), "seq": seq, "states": states}
    if duration_n:
        entry["duration_n"], entry["duration_s"] = duration_n, round(duration_s, 6)
    return entry


def _failure(key: str, prefix: str, group: str, seq: int, message: str) -> dict[str, Any]:
    names = {"key": fitting(key, KEY_MAX), "prefix": fitting(prefix), "group": fitting(group)}
    return {**names, "seq": seq, "message": _text(message[:MESSAGE_MAX])}


_WRITERS: dict[str, Callable[..., dict[str, Any]]] = {"events": _event, "counts": _count, "failures": _failure}
