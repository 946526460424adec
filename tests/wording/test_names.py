"""Names are shown so that they can be seen."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dstackweb.wording.sentence import visible


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("train", "train"), ("two words", "two words"), (" ", "␣"), ("  x ", "␣␣x␣"), ("", "␣"), ("\n", "␊"),
        ("a\tb", "a␉b"), ("\u202egpj", "[U+202E]gpj"), ("\u200b", "[U+200B]"), ("\u200d", "[U+200D]"),
        ("\u00a0", "[U+00A0]"), ("\x7f", "[U+007F]"), ("مرحبا", "مرحبا"), ("tâche ✓ 仕事", "tâche ✓ 仕事"),
        ("👩\u200d🔬", "👩\u200d🔬"),
    ],
)  # fmt: skip
def test_a_name_is_shown(name: str, shown: str) -> None:
    assert visible(name) == shown


@given(st.text())
def test_every_name_has_visible_characters(name: str) -> None:
    shown = visible(name)
    assert shown.strip() == shown != ""
    assert "\n" not in shown
