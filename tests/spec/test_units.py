"""Ranges, sizes and durations read as they are written, and are written as they are read."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstackweb.spec import units
from dstackweb.spec.units import Range

COUNTS = st.integers(0, units.MAX_COUNT)
SIZES = st.integers(0, units.MAX_MEMORY_MIB)


def ranges(values: st.SearchStrategy[int]) -> st.SearchStrategy[Range]:
    """Closed, half-open and single-valued ranges."""
    closed = st.tuples(values, values).map(lambda pair: Range(min(pair), max(pair)))
    return st.one_of(closed, values.map(lambda n: Range(n, None)), values.map(lambda n: Range(None, n)))


@given(ranges(COUNTS))
def test_a_written_range_reads_back_the_same(value: Range) -> None:
    assert units.parse_range(units.format_range(value), units.parse_count) == value


@given(ranges(SIZES))
def test_a_written_memory_range_reads_back_the_same(value: Range) -> None:
    assert units.parse_range(units.format_range(value, units.format_memory), units.parse_memory) == value


@given(st.integers(0, units.MAX_DURATION_S))
def test_a_written_duration_reads_back_the_same(seconds: int) -> None:
    assert units.parse_duration(units.format_duration(seconds)) == seconds


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (units.parse_count, units.parse_memory, units.parse_duration):
        with suppress(ValueError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", Range(2, 2)),
        ("2..", Range(2, None)),
        ("..8", Range(None, 8)),
        ("2..8", Range(2, 8)),
        (" 2 .. 8 ", Range(2, 8)),
    ],
)
def test_the_four_forms_of_a_range(text: str, expected: Range) -> None:
    assert units.parse_range(text, units.parse_count) == expected


@pytest.mark.parametrize(
    ("text", "mib"),
    [("8GB", 8192), ("8 gb", 8192), ("512MB", 512), ("1TB", 1 << 20), ("1.5GB", 1536), ("16", 16384), ("0.5", 512)],
)
def test_sizes_are_binary_and_bare_numbers_are_gigabytes(text: str, mib: int) -> None:
    assert units.parse_memory(text) == mib


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("24h", 86400), ("1h30m", 5400), ("1d 2h", 93600), ("2w", 1209600), ("3600", 3600)],
)
def test_durations_take_units_and_bare_seconds(text: str, seconds: int) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "..", "8..2", "2...8", "2..4..8", "-1", "+1", "1.5", "1e3", "²", "٣", "x"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        units.parse_range(text, units.parse_count)


@pytest.mark.parametrize("text", ["", "h", "1x", "1h30", "-5m", "1.5h", "4000d", "9" * 30, "٣h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["", "GB", "8KB", "-8GB", "8GB5", "2000000TB", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        units.parse_memory(text)


def test_numbers_fit_a_32_bit_column() -> None:
    assert max(units.MAX_COUNT, units.MAX_MEMORY_MIB, units.MAX_DURATION_S) < 2**31
