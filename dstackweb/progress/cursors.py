"""Cursors of lists: the last row's place among groups of rows, and its id."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def after_id(column: str, value: int, after: str | None) -> tuple[str, list[int | str]]:
    """A condition for rows with this value that follow the cursor in the order of their ids.

    Written as a range of both columns: for an equality and an order by id, PostgreSQL may scan all ids.
    """
    return (
        f" WHERE ({column}, id) > (%s, %s) AND {column} <= %s",
        [value, 0 if after is None else parse_cursor(after)[1], value],
    )


def parse_cursor(after: str) -> list[int]:
    """The two 64-bit numbers of a cursor made by `next_cursor`. Raises ValueError."""
    numbers = [int(number) for number in after.split(".")]
    if len(numbers) != 2 or any(abs(number) >= 2**63 for number in numbers):
        raise ValueError(f"{after!r} is not a cursor")
    return numbers


def next_cursor(found: Sequence[object], limit: int, last: Callable[[], tuple[int, int]]) -> str | None:
    return "{}.{}".format(*last()) if len(found) > limit else None
