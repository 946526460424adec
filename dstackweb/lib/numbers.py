"""Numbers of query strings."""

from __future__ import annotations

NUMBER_MAX = 2**53


def whole_number(text: str | None, least: int = 0) -> int:
    """An integer of a query string, capped at what databases can store; `least` for anything else."""
    try:
        return min(max(least, int(text or "")), NUMBER_MAX)
    except ValueError:
        return least
