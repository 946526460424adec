"""How names stand in a request, whatever a program has for one."""

from __future__ import annotations

from hypothesis import given, strategies as st

from dstackweb.progress import models
from dstackweb.tracking.client import KEY_MAX, MESSAGE_MAX, NAME_MAX, shorten_name, to_json


@given(st.lists(st.text(max_size=400), max_size=20))
def test_names_fit_and_stay_apart(names: list[str]) -> None:
    short = [shorten_name(name) for name in names]
    assert all(0 < len(name) <= NAME_MAX and "\0" not in name for name in short)
    plain = {name for name in names if name and "\0" not in name}
    assert len({shorten_name(name) for name in plain}) == len(plain)


def test_long_names_with_the_same_beginning_stay_apart() -> None:
    first, second = shorten_name("x" * 300 + "1"), shorten_name("x" * 300 + "2")
    assert first != second
    assert len(first) == len(second) == NAME_MAX


def test_names_are_cut_at_the_servers_limits() -> None:
    assert (KEY_MAX, NAME_MAX) == (models.KEY_MAX, models.NAME_MAX)
    event = to_json("events", "k" * 999, (1, "erred", "p" * 999, "g" * 999, None, "m" * 9999))
    assert [len(event[name]) for name in ("key", "prefix", "group", "message")] == [300, 200, 200, MESSAGE_MAX]
    count = to_json("counts", ("p" * 999, "g" * 999), (1, {"memory": 1}, 0, 0.0))
    assert [len(count[name]) for name in ("prefix", "group")] == [200, 200]
