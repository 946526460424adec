"""docs/run-file.md says what the models say."""

from __future__ import annotations

import re

import pytest

from dstackweb.lib.errors import DomainError
from dstackweb.spec.array import Array
from dstackweb.spec.mappings import RETRY_EVENTS
from dstackweb.spec.run_fields import RunFields
from dstackweb.spec.run_file import parse_run_file, split
from dstackweb.spec.wording import REFUSED_KEYS, REFUSED_TYPES
from tools.run_file_tables import DOC, filled


def test_the_tables_are_those_of_the_models() -> None:
    text = DOC.read_text()
    assert text == filled(text), "write them anew: python -m tools.run_file_tables"


def test_every_key_is_in_a_table() -> None:
    rows = set(re.findall(r"^\| `([a-z_.]+)` \|", DOC.read_text(), re.MULTILINE))
    assert set(RunFields.model_fields) <= rows
    assert {f"retry.{key}" for key in ("on_events", "duration", "max_attempts")} <= rows
    assert all(event in DOC.read_text() for event in RETRY_EVENTS)


def test_the_examples_in_the_text_are_read() -> None:
    file, following, pipeline, sweep, env = re.findall(r"```yaml\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert parse_run_file(file).fields.name == "train-llama"
    assert [one.run for one in parse_run_file(following).fields.after or ()] == ["train", "clean"]
    assert [parse_run_file(part.config).fields.name for part in split(pipeline)] == ["prepare", "train", "report"]
    array = parse_run_file(sweep).fields.array
    assert array is not None
    assert Array.of(array).size == 12
    assert parse_run_file(f"type: task\ncommands: [a]\n{env}", client_env={"HF_TOKEN": "x"}).masked_env == {"HF_TOKEN"}


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_every_unsupported_key_is_refused_with_a_remedy(key: str) -> None:
    config: dict[str, object] = {"type": "task", "commands": ["a"]}
    *parents, last = key.split(".")
    inner = config
    for parent in parents:
        inner[parent] = inner = {}
    inner[last] = 1
    with pytest.raises(DomainError, match="not supported") as caught:
        parse_run_file(config)
    assert REFUSED_KEYS[key] in caught.value.detail


@pytest.mark.parametrize("name", REFUSED_TYPES)
def test_every_unsupported_type_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(DomainError, match="not supported") as caught:
        parse_run_file({"type": name, "commands": ["a"]})
    assert REFUSED_TYPES[name] in caught.value.detail
