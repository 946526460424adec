"""Small texts that would become huge, or take long: refused before they do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from dstackweb.lib.errors import Invalid
from dstackweb.spec import env, mappings
from dstackweb.spec.run_file import parse_run_file
from dstackweb.spec.source import MAX_BYTES, read
from tests.support import REPO

TASK = "type: task\ncommands: [a]\n"
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from dstackweb.lib.errors import DomainError
from dstackweb.spec.run_file import parse_run_file
try:
    parse_run_file(sys.stdin.read())
except DomainError as error:
    print(error.detail)
else:
    print("valid")
"""


def limited(text: str) -> str:
    """What becomes of it within 20 s of CPU and 1 GiB."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], input=text, capture_output=True, text=True, cwd=REPO, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{TASK}name: {'1' * 250_000}x\n", "`name`"),
        (f"{TASK}name: .{'1' * 250_000}x\n", "`name`"),
        (f"type: task\ncommands: [&a '{'z' * 100_000}'{', *a' * 15_000}]\n", "expands to more than 256 KB"),
        (f"{TASK}env: {{A: &a '{'z' * 100_000}', B: *a, C: *a}}\n", "expands to more than 256 KB"),
        (f"{TASK}? {'A' * 60_000}\n: [{'0,' * 19_000}]\n", "a key, with those around it, has more than 500"),
        (f"{TASK}schedule:\n  cron: [&a '{'0-59,' * 2000}1 0 1 1 *'{', *a' * 15}]\n", "more than 200 characters"),
        (f"{TASK}schedule:\n  cron: ['0 2 * * *'{', 0 2 * * *' * 15_000}]\n", "schedule.cron"),
        (f"{TASK}max_duration: {'1' * 250_000}\n", "`max_duration`"),
        (f"{TASK}resources: {{gpu: '{'A100:' * 40_000}'}}\n", "resources.gpu"),
        (f"{TASK}resources: {{gpu: '{'A,' * 100_000}'}}\n", "resources.gpu"),
        (f"{TASK}resources: {{memory: '{'1' * 200_000}GB'}}\n", "resources.memory"),
        (f"{TASK}env: {{A: '{'${{ ' * 50_000}'}}\n", "is not supported"),
        (f"{TASK}env: {{A: '{'${{ secrets.A' + ' ' * 200_000}'}}\n", "is not supported"),
    ],
    ids=range(13),
)
@pytest.mark.nightly
def test_hostile_text_is_refused_with_little_time_and_memory(text: str, says: str) -> None:
    assert len(text) < MAX_BYTES
    assert says in limited(text)


def test_aliases_count_as_the_text_that_they_repeat() -> None:
    text = "commands: [&a '{}', *a, *a]"
    assert len(read(text.format("z" * (MAX_BYTES // 3 - 100))).data["commands"]) == 3
    with pytest.raises(Invalid, match="expands to more than 256 KB of text"):
        read(text.format("z" * (MAX_BYTES // 3 + 100)))


@pytest.mark.parametrize("config", ["? {key}\n: 1\n", {"{key}": 1}, {"a": {"{key}": [1]}}, "a:\n  ? {key}\n  : [1]\n"])
def test_long_keys_are_refused(config: Any) -> None:
    def made(value: Any) -> Any:
        if isinstance(value, dict):
            return {made(key): made(child) for key, child in value.items()}
        return value.replace("{key}", "k" * 501) if isinstance(value, str) else value

    with pytest.raises(Invalid, match="has more than 500 characters"):
        read(made(config))


def test_the_environment_has_the_kernels_limits() -> None:
    fits = {"A": "x" * (env.MAX_VALUE - 2), "B": "y" * (env.MAX_VALUE - 2)}
    task: dict[str, Any] = {"type": "task", "commands": ["a"]}
    listed = parse_run_file({**task, "env": ["A", "B"]}, fits)
    assert listed.masked_env == {"A", "B"}
    subprocess.run(["/bin/true"], env=fits, check=True)
    for given, says in (
        ({"A": "x" * (env.MAX_VALUE - 1)}, "`env` has more than 128 KB in A"),
        ({"A": "é" * 65_535}, "`env` has more than 128 KB in A"),
        (fits | {"C": "z" * 10}, "`env` has more than 256 KB in all values"),
    ):
        with pytest.raises(Invalid, match=says):
            parse_run_file({**task, "env": list(given)}, given)
    with pytest.raises(Invalid, match="`env` has more than 128 KB in A"):
        parse_run_file(task, overrides={"env": {"A": "x" * env.MAX_VALUE}})


def test_no_expression_of_a_schedule_with_too_many_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "croniter", lambda *_: pytest.fail("looked at"))
    with pytest.raises(Invalid, match="at most 20 expressions"):
        parse_run_file(f"{TASK}schedule:\n  cron: [&a '0 0 30 2 *'{', *a' * 19_000}]\n")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"resources": {"gpu": ",".join(f"G{n}" for n in range(51))}}, "more than 50 names"),
        ({"resources": {"gpu": {"name": [f"G{n}" for n in range(51)]}}}, "more than 50 names"),
        ({"resources": {"gpu": "G" * 101}}, "is not a GPU name"),
        ({"backends": [f"b{n}" for n in range(101)]}, "more than 100 names"),
        ({"regions": [f"r{n}" for n in range(101)]}, "more than 100 names"),
        ({"instance_types": ["i" * 101]}, "more than 100 characters"),
        ({"labels": {"disk": [f"d{n}" for n in range(101)]}}, "more than 100 accepted values"),
        ({"labels": {f"l{n}": ["a", "b", "c"] for n in range(34)}}, "more than 100 accepted values"),
        ({"image": "i" * 501}, "more than 500 characters"),
    ],
)
def test_a_run_names_no_more_than_anybody_needs(keys: dict[str, Any], says: str) -> None:
    """Each pass compares what it names with all GPUs and offers, and each list of runs shows what is missing."""
    with pytest.raises(Invalid, match=says):
        parse_run_file({"type": "task", "commands": ["a"], **keys})


def test_an_object_has_as_many_values_as_text_may_have() -> None:
    task = {"type": "task", "commands": ["a"] * 19_990}
    assert len(read(task).data["commands"]) == 19_990
    with pytest.raises(Invalid, match="more than 20,000 values"):
        read({"type": "task", "commands": ["a"] * 20_000})


def test_a_run_may_name_as_much_as_the_limits_say() -> None:
    keys: dict[str, Any] = {
        "resources": {"gpu": ",".join([*(f"G{n}" for n in range(49)), "G" * 100, "G1"])},
        "regions": ["r" * 100, *(f"r{n}" for n in range(99)), "r1"],
        "labels": {f"l{n}": ["a", "b"] for n in range(50)},
        "image": "i" * 500,
    }
    fields = parse_run_file({"type": "task", "commands": ["a"], **keys}).fields
    assert fields.resources
    assert fields.resources.gpu
    assert len(fields.resources.gpu.name or ()) == 50
    assert len(fields.regions or ()) == 100


def test_secrets_are_not_filled_in_beyond_the_limit() -> None:
    secrets = {"S": "s" * 1000}
    assert len(env.fill_secrets({"A": "${{ secrets.S }}" * 100}, secrets)["A"]) == 100_000
    with pytest.raises(Invalid, match="more than 128 KB in A"):
        env.fill_secrets({"A": "${{ secrets.S }}" * 200}, secrets)
    with pytest.raises(Invalid, match="more than 256 KB in all values with their secrets"):
        env.fill_secrets({"A": "${{ secrets.S }}" * 5000, "B": "${{ secrets.S }}" * 5000}, secrets)
