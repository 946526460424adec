"""Prefixes and groups come out as Dask's do, but for the words that Dask takes for hashes."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given, strategies as st

from dstackweb.progress.keys import DATA, OTHER, ParsedKey, split
from dstackweb.progress.models import NAME_MAX

TABLE: list[tuple[object, str, str]] = [
    # What Dask's own documentation promises.
    ("x", "x", "x"),
    ("x-1", "x", "x"),
    ("x-1-2-3", "x", "x"),
    (("x-2", 1), "x", "x-2"),
    ("('x-2', 1)", "x", "x-2"),
    ("('x', 1)", "x", "x"),
    ("hello-world-1", "hello-world", "hello-world"),
    (b"hello-world-1", "hello-world", "hello-world"),
    ("ae05086432ca935f6eba409a8ecd4896", DATA, DATA),
    ("<module.submodule.myclass object at 0xdaf372", "myclass", "myclass"),
    (None, OTHER, OTHER),
    ("x-abcdefab", "x", "x"),
    ("_(x)", "x", "x"),
    # Its trap: ordinary words of eight letters that begin with a-f.
    ("train-baseline-3", "train-baseline", "train-baseline"),
    ("train-finetune-lr3", "train-finetune", "train-finetune"),
    ("eval-accuracy", "eval-accuracy", "eval-accuracy"),
    ("('fit-classify-0f3a', 2)", "fit-classify", "fit-classify-0f3a"),
    (("download-dataset1-x", 7), "download", "download-dataset1-x"),
    # Names of runs.
    ("train-17", "train", "train"),
    ("llama-7b-train-3", "llama", "llama"),
    ("gpt2-train-3", "gpt2-train", "gpt2-train"),
    ("brave-otter-1", "brave-otter", "brave-otter"),
    ("训练-3", "训练", "训练"),
    # What says nothing.
    ("", OTHER, OTHER),
    ("-", OTHER, OTHER),
    ("()", OTHER, OTHER),
    ("<>", OTHER, OTHER),
    ((), OTHER, OTHER),
    (("", 1), OTHER, OTHER),
    (((("x-2", 1),), 0), "x", "x-2"),
    (([], 1), OTHER, OTHER),
    (17, OTHER, OTHER),
    (b"\xff-1", "\ufffd", "\ufffd"),
]


@pytest.mark.parametrize(("key", "prefix", "group"), TABLE, ids=[repr(key) for key, _, _ in TABLE])
def test_the_table(key: object, prefix: str, group: str) -> None:

    assert split(key) == ParsedKey(prefix, group)


WORDS = st.one_of(
    st.text("abcdefgxyz", min_size=1, max_size=9),
    st.text("0123456789abcdef", min_size=1, max_size=32),
    st.sampled_from(["baseline", "abcdefab", "deadbeef", "ABCDEFAB", "sum", "größe", "0" * 32, "f" * 32]),
)
NAMES = st.lists(WORDS, min_size=1, max_size=5).map("-".join)
KEYS = st.one_of(
    NAMES,
    st.tuples(NAMES, st.integers(0, 9)),
    st.tuples(NAMES, st.integers(0, 9)).map(repr),
    NAMES.map(str.encode),
    st.text("_'\"-ax1,.", min_size=1, max_size=12),
)


def springs_the_trap(key: object) -> bool:
    """Some word looks like a hash to Dask alone, because its first letter does."""
    return any(
        len(word) == 8 and word.isalpha() and word[0] in "abcdef" and not re.fullmatch("[a-f]{8}", word)
        for word in re.split(r"[-'\",() ]", str(key))
    )


@given(KEYS)
@example("x-deadbeef-y")
@example("('x', 0)")
@example(f"{'a' * 32}-b")
def test_where_no_word_springs_the_trap_all_is_as_dask_has_it(key: object) -> None:
    utils = pytest.importorskip("distributed.utils")
    assume(not springs_the_trap(key))

    assert split(key) == (utils.key_split(key), utils.key_split_group(key))


@given(st.one_of(st.text(), st.binary(), st.none(), st.integers(), st.tuples(st.text(), st.lists(st.integers()))))
@example("a" * 500)
@example(("a" * 500, 1))
@example("(" + "b" * 500)
def test_whatever_the_key_there_is_a_name_that_fits(key: object) -> None:
    place = split(key)

    assert all(0 < len(name) <= NAME_MAX for name in place)
