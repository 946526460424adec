"""Ranges, sizes and durations read as they are written, and are written as they are read."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

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
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        units.parse_range(text, units.parse_count)


@pytest.mark.parametrize("text", ["", "h", "1x", "1h30", "-5m", "1.5h", "4000d", "9" * 30, "٣h"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["", "GB", "8KB", "-8GB", "8GB5", "2000000TB", "9" * 30])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        units.parse_memory(text)


def test_numbers_fit_a_32_bit_column() -> None:
    assert max(units.MAX_COUNT, units.MAX_MEMORY_MIB, units.MAX_DURATION_S) < 2**31


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0, "0 s"),
        (12.9, "12 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (5400, "1 h 30 min"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d"),
        (90_000, "1 d 1 h"),
        (183_600, "2 d 3 h"),
    ],
)
def test_durations_are_shown_in_their_two_largest_units(seconds: float, text: str) -> None:
    assert units.duration_text(seconds) == text


@pytest.mark.parametrize(
    ("mib", "text"),
    [(0, "0 MB"), (512, "512 MB"), (1024, "1 GB"), (1536, "1.5 GB"), (81920, "80 GB"), (1572864, "1.5 TB")],
)
def test_memory_is_shown_in_the_unit_that_fits(mib: int, text: str) -> None:
    assert units.memory_text(mib) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1 KB"),
        (3_565_158, "3.4 MB"),
        ((1 << 20) - 1, "1 MB"),
    ],
)
def test_sizes_are_shown_in_the_unit_that_fits(size: int, text: str) -> None:
    assert units.size_text(size) == text


@pytest.mark.parametrize(
    ("usd", "text"), [(0, "$0.00"), (1.5, "$1.50"), (0.0104, "$0.0104"), (12345.6, "$12,345.60"), (2.125, "$2.125")]
)
def test_prices_are_shown_to_the_cent_or_as_exactly_as_they_are_known(usd: float, text: str) -> None:
    assert units.price_text(usd) == text
