from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from dstackweb.lib.log_bins import LogBins
from tests.support import examples

BINS = LogBins(least=1.0, per_octave=3, count=64)
values = st.floats(0, 1e8)


@given(values)
@examples(500)
def test_each_value_is_within_its_bin(value: float) -> None:
    number = BINS.bin_of(value)
    assert BINS.low(number) * (1 - 1e-8) <= value
    assert value <= BINS.high(number) * (1 + 1e-8) or number == BINS.count - 1


def test_a_bound_is_in_the_bin_that_it_ends() -> None:
    assert [BINS.bin_of(BINS.high(number)) for number in range(64)] == list(range(64))


@given(st.lists(st.floats(1.5, 1e6), min_size=1, max_size=40), st.floats(0.01, 1))
@examples(300)
def test_a_quantile_is_off_by_the_width_of_a_bin_at_most(found: list[float], share: float) -> None:
    counts = Counter(map(BINS.bin_of, found))
    estimated = BINS.quantile(counts, share)
    assert estimated is not None
    exact = sorted(found)[max(0, -int(-share * len(found) // 1) - 1)]
    assert exact / 2 ** (1 / 3) * (1 - 1e-6) <= estimated <= exact * 2 ** (1 / 3) * (1 + 1e-6)


@given(st.lists(st.floats(1.5, 1e6), min_size=1, max_size=40), st.floats(0.01, 1), st.floats(0, 1e6))
@examples(300)
def test_what_is_above_a_value_has_its_own_quantiles(found: list[float], share: float, above: float) -> None:
    counts = Counter(map(BINS.bin_of, found))
    estimated = BINS.quantile(counts, share, above)
    if estimated is None:
        assert all(BINS.high(BINS.bin_of(value)) <= above for value in found)
    else:
        assert estimated >= above


def test_nothing_has_no_quantile() -> None:
    assert BINS.quantile({}, 0.5) is None
    assert BINS.quantile({3: 0}, 0.5) is None


@given(st.lists(st.floats(1.5, 1e6), max_size=40), st.lists(st.floats(0, 1), max_size=9), st.floats(0, 1e6))
@examples(200)
def test_several_quantiles_are_those_that_each_would_be(found: list[float], shares: list[float], above: float) -> None:
    counts = Counter(map(BINS.bin_of, found))
    together = BINS.quantiles(counts, sorted(shares), above)
    assert together == [each for share in sorted(shares) if (each := BINS.quantile(counts, share, above)) is not None]
