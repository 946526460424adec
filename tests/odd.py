"""Valid JSON with one value replaced by any other: what a parser has to refuse without failing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 10**25, -1e308, 1e-320, "", " ", "x" * 300, "\0", "\ud800", "é\u202e", "1..2", "nan",
    "${{ secrets.A }}", [], [[]], ["x", "x"], [1], [None], [{}], {}, {"a": 1}, {"a": [["b"]]}, {"": None},
)  # fmt: skip
"""Of each type, empty, too large, and what other places take."""

_plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.sampled_from(ODD) | st.recursive(
    _plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)

Path = tuple[str | int, ...]


def paths(value: Any, here: Path = ()) -> Iterator[Path]:
    """The places in a value, itself first."""
    yield here
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths(child, (*here, key))


def replaced(value: Any, path: Path, by: Any) -> Any:
    """A copy of it with another value at this place."""
    if not path:
        return by
    changed = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = by
    return changed
