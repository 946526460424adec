"""YAML becomes plain data with lines; broken, hostile or huge text becomes one clear error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.lib.errors import FieldError, Invalid, TooLarge
from dstackweb.spec.source import MAX_BYTES, MAX_ERRORS, as_yaml, read


def refused(config: Any) -> list[FieldError]:
    with pytest.raises(Invalid) as caught:
        read(config)
    return caught.value.errors


def test_each_key_and_item_has_its_line() -> None:
    source = read("type: task\n\ncommands:\n  - a\n  - b\nresources:\n  gpu: 1\n")
    assert source.lines == {
        "type": 1,
        "commands": 3,
        "commands.0": 4,
        "commands.1": 5,
        "resources": 6,
        "resources.gpu": 7,
    }


def test_a_place_that_is_not_there_has_the_line_around_it() -> None:
    source = read("a: 1\nretry:\n  duration: 1h\n")
    assert source.line(("retry", "on_events", 0)) == 2
    assert source.line(("missing",)) is None


def test_plain_scalars_are_read_as_in_json() -> None:
    text = "{a: true, b: 1, c: 1.5, d: 1e-4, e: yes, f: 12:30, g: 2026-01-01, h: 0x10, i: 010, j: ~, k: '1', l: .nan}"
    assert read(text).data == {
        "a": True, "b": 1, "c": 1.5, "d": 0.0001, "e": "yes", "f": "12:30", "g": "2026-01-01", "h": "0x10", "i": 10,
        "j": None, "k": "1", "l": ".nan",
    }  # fmt: skip


def test_commands_and_env_stay_as_they_are_written() -> None:
    source = read("commands: [true, 1.10]\nenv: {VERSION: 1.10, DEBUG: true, PORT: 0800, EMPTY: ''}")
    assert source.data["commands"] == ["true", "1.10"]
    assert source.data["env"] == {"VERSION": "1.10", "DEBUG": "true", "PORT": "0800", "EMPTY": ""}


def test_a_short_alias_is_fine() -> None:
    assert read("a: &x [1, 2]\nb: *x").data == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: [1, 2", 2, "line 2, column 9"),
        ("a: 1\n\tb: 2", 2, "not tabs"),
        ("commands:\n  - x\n name: y: z", 3, "line 3"),
        ("a: b: c", 1, "quote text"),
        ("a: 1\n---\nb: 2", 2, "another document"),
        ("a: *nowhere", 1, "undefined alias"),
        ("a: 1\nb: \x07", 2, "invalid character (code 7)"),
        ("a: 1\nb: \ud800", 2, "invalid character (code 55296)"),
        ("", 1, "empty"),
        ("# only a comment", 1, "empty"),
        ("just words", 1, "mapping of keys"),
        ("[1, 2]", 1, "mapping of keys"),
        ("a: 1\nb: 2\na: 3", 3, "`a` is given twice; first in line 1"),
        ("r:\n  gpu: 1\n  gpu: 2", 3, "`r.gpu` is given twice; first in line 2"),
        ("? [1]\n: 2", 1, "a key must be plain text"),
        ('"\\0": 2', 1, "a key must be plain text"),
        ("a: 1\nb: !python/object:os.system x", 2, "tag !python"),
        ("a: !!int x", 1, "tag"),
        ('a: "\\0"', 1, "NUL"),
        ('a: "\\uD800"', 1, "invalid Unicode character"),
        ("a: &x\n  b: *x", 1, "contains itself"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(text: str, line: int, says: str) -> None:
    [error] = refused(text)
    assert error["line"] == line
    assert says in error["msg"]


def test_invalid_yaml_is_reported_with_its_column() -> None:
    [error] = refused("a: 1\nb: c: d")
    assert (error["line"], error["col"]) == (2, 5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nesting"),
        ("a: " + "[" * 30 + "]" * 30, "nesting"),
        # What follows too many values is not even parsed.
        ("[" + "a," * 100_000 + "@", "more than 20,000 values"),
        ("{" + "a," * 100_000 + "@", "more than 20,000 values"),
        ("- a\n" * 50_000 + "@", "more than 20,000 values"),
        ("--- a\n" * 30_000 + "@", "more than 20,000 values"),
        ("\n".join(f"k{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else '1'] * 10)}]" for n in range(8)), "expands"),
    ],
)
def test_bombs_end_in_an_error_and_quickly(text: str, says: str) -> None:
    assert says in refused(text)[0]["msg"]


def test_a_file_of_256_kb_is_read_and_one_byte_more_is_not() -> None:
    text = "a: 1\n#"
    assert read(text + "x" * (MAX_BYTES - len(text))).data == {"a": 1}
    with pytest.raises(TooLarge, match="256"):
        read(text + "x" * (MAX_BYTES - len(text) + 1))
    with pytest.raises(TooLarge):
        read({"a": "x" * MAX_BYTES})


def test_of_a_thousand_errors_the_first_are_reported() -> None:
    assert len(refused("a: 1\n" * 1000)) == MAX_ERRORS


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return {"a": value}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"a": "\0"}, "NUL"),
        ({"a": ["\ud800"]}, "surrogate"),
        ({"\0": 1}, "a key must be"),
        ({"a": float("nan")}, "JSON"),
        ({"a": object()}, "JSON"),
        (deep(30), "nesting"),
        (deep(100_000), "nesting"),
    ],
)
def test_an_object_is_held_to_the_same_rules(config: Any, says: str) -> None:
    [error] = refused(config)
    assert says in error["msg"]
    assert error["line"] is None


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(Invalid):
        assert isinstance(read(text).data, dict)


@given(st.text(alphabet="ab:-[]{}&*!?,#|>'\"%@ \n\t0.", max_size=80))
def test_any_text_of_yaml_signs_is_read_or_refused(text: str) -> None:
    with suppress(Invalid):
        assert isinstance(read(text).data, dict)


def test_an_object_as_yaml_reads_as_people_write_it() -> None:
    config = {
        "type": "task",
        "name": "1e3",
        "priority": 7,
        "commands": ["python train.py", "if true; then\n  echo: 1\nfi\n"],
        "env": {
            "ON": "yes",
            "NO": "true",
            "N": "7",
            "WHEN": "2026-01-01",
            "NONE": None,
            "ÄÖ": "${{ secrets.X }}",
        },
    }
    text = as_yaml(config)
    assert text == (
        "type: task\n"
        "name: '1e3'\n"
        "priority: 7\n"
        "commands:\n"
        "- python train.py\n"
        "- |\n"
        "  if true; then\n"
        "    echo: 1\n"
        "  fi\n"
        "env:\n"
        "  ON: yes\n"
        "  NO: 'true'\n"
        "  N: '7'\n"
        "  WHEN: 2026-01-01\n"
        "  NONE: null\n"
        "  ÄÖ: ${{ secrets.X }}\n"
    )
    assert read(text).data == config


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1, max_size=8), PLAIN, min_size=1, max_size=4))
def test_any_object_is_the_same_as_yaml(config: dict[str, Any]) -> None:
    with suppress(Invalid):
        config = read(config).data
        assert read(as_yaml(config)).data == config
