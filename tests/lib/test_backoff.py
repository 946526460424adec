"""Full jitter."""

from __future__ import annotations

from hypothesis import given, strategies as st

from dstackweb.lib.network import full_jitter


@given(st.integers(0, 10**6), st.floats(0.01, 10), st.floats(0.01, 600), st.floats(0, 1, exclude_max=True))
def test_a_wait_lies_between_nothing_and_the_doubled_base_or_the_cap(
    attempt: int, base_s: float, cap_s: float, draw: float
) -> None:
    wait_s = full_jitter(attempt, base_s, cap_s, lambda: draw)

    assert 0 <= wait_s <= cap_s
    assert wait_s <= base_s * 2 ** min(attempt, 60)


def test_the_bound_doubles_with_each_attempt_until_the_cap() -> None:
    assert [full_jitter(attempt, 0.5, 5, lambda: 1.0) for attempt in range(6)] == [0.5, 1, 2, 4, 5, 5]
