"""What `array` makes of one run file."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.lib.errors import Invalid
from dstackweb.profiles.resolve import resolve
from dstackweb.spec.array import MOST_RUNS, Array, ArrayFields
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.run_file import parse_run_file

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True).filter(lambda name: not name.startswith("DSTACK"))
VALUES = st.one_of(st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=5), st.integers(-9, 9))


def array_of(value: Any) -> Array:
    spec = resolve(parse_run_file({"type": "task", "commands": ["true"], "array": value}), None).spec
    assert spec.array is not None
    assert EffectiveSpec.model_validate_json(spec.model_dump_json()) == spec, "it survives being stored"
    return spec.array


def all_of(array: Array) -> list[dict[str, str]]:
    return [array.parameters(index) for index in range(array.size)]


@given(st.dictionaries(NAMES, st.lists(VALUES, min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_matrix_makes_every_combination_once_and_changes_the_last_parameter_first(
    matrix: dict[str, list[str | int]],
) -> None:
    expected = [dict(zip(matrix, map(str, values), strict=True)) for values in itertools.product(*matrix.values())]
    array = array_of({"matrix": matrix})
    assert all_of(array) == expected
    assert list(array.names) == list(matrix)
    assert array_of(array.as_file()) == array, "its own notation makes the same"


@given(st.lists(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_list_makes_a_run_of_each_item_with_its_own_parameters(items: list[dict[str, str | int]]) -> None:
    array = array_of({"list": items})
    assert all_of(array) == [{name: str(value) for name, value in item.items()} for item in items]
    assert array_of(array.as_file()) == array


@pytest.mark.parametrize("value", [3, {"count": 3}])
def test_a_count_makes_runs_that_differ_in_their_index_only(value: Any) -> None:
    assert all_of(array_of(value)) == [{}, {}, {}]


def test_there_is_no_run_beyond_the_last_or_before_the_first() -> None:
    for index in (-1, 2):
        with pytest.raises(IndexError):
            array_of(2).parameters(index)


@pytest.mark.parametrize(
    ("text", "line", "msg"),
    [
        ("array: {}", 3, "exactly one of"),
        ("array: 0", 3, "it makes no run"),
        ("array:\n  count: 2\n  matrix: {A: [1]}", 3, "exactly one of"),
        ("array:\n  matrix:\n    9LR: [1]", 5, "not a valid variable name"),
        ("array:\n  matrix:\n    DSTACK_X: [1]", 5, "set by dstackweb"),
        ("array:\n  matrix:\n    LR: 0.1", 5, "a list of at least one value"),
        ("array:\n  list:\n    - {LR: 1}\n    - {LR: {}}", 6, "text or a number"),
        ("array:\n  list: [3]", 4, "should be a mapping"),
        ("array:\n  matrix:\n    KEY: ['${{ secrets.X }}']", 5, "can't contain a secret"),
        (f"array: {MOST_RUNS + 1}", 3, "more than 100,000"),
        ("array:\n  max_parallel: 0\n  count: 2", 4, "at least 1"),
    ],
)
def test_an_invalid_array_is_refused_with_its_line(text: str, line: int, msg: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_run_file(f"type: task\ncommands: [x]\n{text}\n")
    assert refused.value.errors[0]["line"] == line
    assert msg in refused.value.errors[0]["msg"]


def test_the_longest_parameters_count_for_the_limit_of_the_environment() -> None:
    array = Array.of(ArrayFields(list=({"A": "x" * 200_000}, {"A": "y"})))
    with pytest.raises(ValueError, match="128 KB in A"):
        array.check_env({})
