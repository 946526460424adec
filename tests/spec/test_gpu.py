"""dstack's one-line grammar for GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dstackweb.spec.units import MAX_COUNT, MAX_MEMORY_MIB, NO_GPU_NAMES, OTHER_VENDORS, Range, format_gpu, parse_gpu
from tests.spec.test_units import ranges

NOT_NAMES = {*OTHER_VENDORS, *NO_GPU_NAMES, "nvidia"}
NAMES = st.lists(
    st.from_regex(r"\A[A-Z][A-Z0-9 -]{0,6}[A-Z0-9]\Z").filter(lambda name: name.lower() not in NOT_NAMES),
    unique=True,
    max_size=3,
)


@given(
    NAMES,
    st.one_of(st.just(Range(None, None)), ranges(st.integers(1, MAX_MEMORY_MIB))),
    ranges(st.integers(0, MAX_COUNT)),
)
def test_a_written_request_reads_back_the_same(names: list[str], memory: Range, count: Range) -> None:
    found = parse_gpu(format_gpu(tuple(names), memory, count))
    expected = {"name": names} if names else {}
    assert found == expected | ({"memory": memory} if memory != Range(None, None) else {}) | {"count": count}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A100:40GB:2", {"name": ["A100"], "memory": Range(40960, 40960), "count": Range(2, 2)}),
        ("2:40GB:A100", {"name": ["A100"], "memory": Range(40960, 40960), "count": Range(2, 2)}),
        ("A100,H100:40GB..:1..4", {"name": ["A100", "H100"], "memory": Range(40960, None), "count": Range(1, 4)}),
        ("24GB", {"memory": Range(24576, 24576)}),
        ("24GB..", {"memory": Range(24576, None)}),
        ("1..8", {"count": Range(1, 8)}),
        ("2", {"count": Range(2, 2)}),
        ("0", {"count": Range(0, 0)}),
        ("RTX 4090", {"name": ["RTX 4090"]}),
        ("nvidia:24GB", {"memory": Range(24576, 24576)}),
        ("nvidia", {}),
    ],
)
def test_names_memory_and_count_in_any_order(text: str, expected: dict[str, object]) -> None:
    assert parse_gpu(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty part"),
        ("A100:", "empty part"),
        ("A100:H100", "two values for name"),
        ("24GB:40GB", "two values for memory"),
        ("1:2", "two values for count"),
        ("A100,", "not a GPU name"),
        ("off", "'off' is not a GPU name"),
        ("All:2", "'All' is not a GPU name"),
        ("amd", "AMD"),
        ("tpu:8", "Google"),
        ("0GB", "greater than zero"),
        ("8XB", "not a size"),
        ("4..1", "starts above its end"),
    ],
)
def test_errors_name_the_mistake(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_gpu(text)
