"""A file with several runs is split at its separators, and errors keep the lines of the whole."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, strategies as st

from dstackweb.lib.errors import Invalid, TooLarge
from dstackweb.spec.run_file import MAX_RUNS, Cycle, PipelineFile, in_order, split
from dstackweb.spec.source import MAX_BYTES, read

ONE = "type: task\nname: one\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ONE,
        f"---\n{ONE}",
        f"# a comment\n---\n{ONE}---\n",
        f"%YAML 1.1\n---\n{ONE}...\n",
        f"---\n---\n\n--- # no\n{ONE}",
    ],
)
def test_a_file_with_one_document_stays_as_it_is(text: str) -> None:
    assert split(text) == [PipelineFile(text)]


def test_each_document_is_a_file_by_itself_with_its_lines() -> None:
    text = "# all\n---\nname: one\n\n--- # the second\nname: two\n...\n---\n---\n- |\n  ---\n  text\n"
    first, second, third = split(text)
    assert (first.config, first.before) == ("name: one\n", 2)
    assert (second.config, second.before) == ("    # the second\nname: two\n", 4)
    assert (third.config, third.before) == ("- |\n  ---\n  text\n", 9)
    [error] = second.at("name", msg="wrong", line=2).errors
    assert error["line"] is not None
    assert text.splitlines()[error["line"] - 1] == "name: two"


VALUES = st.recursive(
    st.text("ab-.# \n'\"|", max_size=12), lambda inner: st.dictionaries(st.text("ab-", min_size=1), inner, max_size=3)
)


@given(st.lists(st.dictionaries(st.text("ab-", min_size=1), VALUES, min_size=1, max_size=3), min_size=2, max_size=5))
def test_documents_are_those_that_a_parser_finds(documents: list[dict[str, object]]) -> None:
    text = yaml.safe_dump_all(documents, sort_keys=False)
    parts = split(text)
    assert [yaml.safe_load(str(part.config)) for part in parts] == documents
    lines = [yaml.compose(str(part.config)).start_mark.line + part.before for part in parts if part.before is not None]
    assert lines == [node.start_mark.line for node in yaml.compose_all(text)]


def test_objects_are_listed() -> None:
    assert split([{"name": "one"}, {"name": "two"}]) == [PipelineFile({"name": "one"}), PipelineFile({"name": "two"})]
    assert split({"name": "one"}) == [PipelineFile({"name": "one"})]
    assert read(split([{"name": "one"}])[0].config).data == {"name": "one"}
    assert PipelineFile({}).at("name", msg="wrong").errors == [{"loc": ["name"], "line": None, "msg": "wrong"}]


def test_too_much_is_refused_with_its_line() -> None:
    with pytest.raises(Invalid, match="a file has 20 runs at most") as refused:
        split("---\na: 1\n" * (MAX_RUNS + 1))
    assert refused.value.errors[0]["line"] == 2 * MAX_RUNS + 2
    with pytest.raises(TooLarge):
        split(f"a: 1\n---\nb: {'x' * MAX_BYTES}")


def test_runs_come_after_those_they_wait_for() -> None:
    waits = {"evaluate": ["train"], "train": ["prepare"], "prepare": [], "report": ["evaluate", "prepare"]}
    assert in_order(waits) == ["prepare", "train", "evaluate", "report"]
    with pytest.raises(Cycle) as found:
        in_order({"a": ["c"], "b": ["a"], "c": ["b"], "d": []})
    assert found.value.path[0] == found.value.path[-1]
    assert sorted(found.value.path[1:]) == ["a", "b", "c"]
