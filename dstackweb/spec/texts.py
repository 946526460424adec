"""Values of run files as text for people."""

from __future__ import annotations

from typing import Any


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """`resources` as `resources.cpu` and so on, as provenance names them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= {f"resources.{part}": inner for part, inner in value.items()} if key == "resources" else {key: value}
    return found


def value_text(value: Any) -> str:
    """A value of a run file, one line per key of a mapping and per command."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {value_text(inner).replace(chr(10), ' ')}" for key, inner in value.items())
    if isinstance(value, list):
        parts = [_short(part) for part in value]
        return ("\n" if any(" " in part for part in parts) else ", ").join(parts)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _short(value: Any) -> str:
    """An item of a list on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in value.items()) + "}"
    return str(value)
