"""Run file, profile and defaults become one spec that knows where each value came from."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from dstackweb.profiles.resolve import Effective, ProfileData, as_hold, resolve
from dstackweb.spec.effective import EffectiveSpec, Retry, UtilizationPolicy
from dstackweb.spec.run_file import parse_profile_settings, parse_run_file

HEAD = "type: task\ncommands: [a]\n"
DEFAULT = {"source": "default"}
NIGHTLY = {"source": "profile", "profile": "nightly"}


def resolved(text: str, profile: dict[str, Any] | None = None) -> Effective:
    data = ProfileData("nightly", parse_profile_settings(profile)) if profile is not None else None
    return resolve(parse_run_file(text), data)


def test_the_file_overrides_the_profile_and_the_profile_the_defaults() -> None:
    found = resolved(HEAD + "max_duration: 2h\n", {"max_duration": "24h", "backends": ["hosts"]})
    assert (found.spec.max_duration_s, found.spec.backends, found.spec.stop_duration_s) == (7200, ("hosts",), 20)
    assert found.provenance["max_duration"] == {"source": "run_file", "line": 3}
    assert found.provenance["backends"] == NIGHTLY
    assert found.provenance["stop_duration"] == DEFAULT


def test_a_setting_disabled_in_the_file_is_off() -> None:
    profile = {"max_duration": "24h", "retry": True}
    found = resolved(HEAD + "max_duration: off\nretry: false", profile)
    assert (found.spec.max_duration_s, found.spec.retry) == (None, None)
    assert found.provenance["retry"] == {"source": "run_file", "line": 4}
    kept = resolved(HEAD, profile).spec
    assert (kept.max_duration_s, kept.retry) == (
        86400,
        Retry(on_events=("no-capacity", "interruption", "error"), duration_s=3600),
    )


def test_a_profiles_utilization_policy_reaches_the_run_in_full() -> None:
    """R16, R17: minimum 50 % and window 1 minute, in a profile."""
    policy = {"min_gpu_utilization": 50, "time_window": "1m", "scope": "all", "warmup": "5m", "action": "notify"}
    found = resolved(HEAD, {"utilization_policy": policy})
    assert found.spec.utilization_policy == UtilizationPolicy(
        min_gpu_utilization=50, time_window_s=60, scope="all", warmup_s=300, action="notify"
    )
    assert found.provenance["utilization_policy"] == NIGHTLY


def test_a_profile_has_an_image_that_the_file_replaces_and_a_hold_does_without() -> None:
    profile = {"image": "python:3.12", "pull_policy": "always"}
    found = resolved(HEAD, profile)
    assert (found.spec.image, found.spec.pull_policy, found.provenance["image"]) == ("python:3.12", "always", NIGHTLY)
    assert resolved(HEAD + "image: busybox\n", profile).spec.image == "busybox"
    hold = as_hold(found)
    assert (hold.spec.image, hold.provenance["image"]) == (None, {"source": "hold"})


def test_a_mapping_of_the_file_replaces_the_profiles_whole() -> None:
    found = resolved(HEAD + "retry: {on_events: [error]}", {"retry": {"duration": "7d"}})
    assert found.spec.retry == Retry(on_events=("error",), duration_s=3600)


def test_each_of_the_resources_has_its_own_source() -> None:
    found = resolved(HEAD + "resources:\n  cpu: 2..\n  gpu: 1\n")
    assert found.provenance["resources.cpu"] == {"source": "run_file", "line": 4}
    assert found.provenance["resources.memory"] == DEFAULT
    assert found.provenance["resources.gpu"] == {"source": "run_file", "line": 5}


def test_settings_of_an_object_have_no_lines_and_those_of_the_command_line_are_marked() -> None:
    run_file = parse_run_file(
        {"type": "task", "commands": ["a"], "nodes": 2}, overrides={"priority": 90, "env": {"A": "1"}}
    )
    found = resolve(run_file, None)
    assert found.provenance["nodes"] == {"source": "run_file", "line": None}
    assert found.provenance["priority"] == found.provenance["env"] == {"source": "command_line"}
    assert (found.spec.priority, found.spec.env) == (90, {"A": "1"})


def test_the_name_of_the_profile_is_stored_and_none_without_one() -> None:
    assert resolved(HEAD, {}).spec.profile == "nightly"
    assert resolved(HEAD).spec.profile is None


def test_values_of_the_client_are_in_no_spec() -> None:
    run_file = parse_run_file(HEAD + "env: [A=1, TOKEN]", client_env={"TOKEN": "hf_123"})
    spec = resolve(run_file, None).spec
    assert (spec.env, spec.masked_env) == ({"A": "1"}, ("TOKEN",))
    assert "hf_123" not in spec.model_dump_json()


def test_every_shown_key_has_a_source() -> None:
    found = resolved(HEAD + "resources: {gpu: 1}\nenv: {A: 1}\n")
    shown = found.spec.as_file()
    resources = {f"resources.{key}" for key in shown.pop("resources")}
    assert resources | set(shown) <= set(found.provenance)


SECONDS = st.integers(1, 10**6)
NAMES = st.lists(st.from_regex(r"\A[a-z][a-z0-9-]{0,8}\Z"), min_size=1, max_size=3)
COUNT = st.one_of(st.integers(1, 64), st.sampled_from(["1..", "2..4", "..8"]))
CONFIGS = st.fixed_dictionaries(
    {"type": st.just("task"), "commands": NAMES},
    optional={
        "name": st.from_regex(r"\A[a-z][a-z0-9-]{0,8}\Z"),
        "env": st.dictionaries(st.from_regex(r"\A[A-C_]{1,3}\Z"), st.text("ab1 .$", max_size=5)),
        "nodes": st.integers(1, 9),
        "priority": st.integers(0, 100),
        "preemptible": st.booleans(),
        "resources": st.fixed_dictionaries(
            {},
            optional={
                "cpu": COUNT,
                "memory": st.sampled_from(["8GB", "512MB..", "..1.5TB"]),
                "gpu": st.sampled_from(["A100:40GB:2", "24GB..", "..2", 0, 3, "A100,H100", "0..", "0..1"]),
            },
        ),
        "backends": NAMES,
        "max_price": st.floats(0, 1e6),
        "max_duration": st.one_of(st.just("off"), SECONDS),
        "stop_duration": st.integers(0, 86400),
        "idle_duration": st.one_of(st.just(False), SECONDS),
        "retry": st.one_of(
            st.booleans(), st.fixed_dictionaries({"on_events": st.just(["error"]), "duration": SECONDS})
        ),
        "utilization_policy": st.fixed_dictionaries(
            {"min_gpu_utilization": st.integers(0, 100), "time_window": st.integers(60, 10**6)},
            optional={"scope": st.sampled_from(["any", "all"]), "warmup": SECONDS},
        ),
        "schedule": st.fixed_dictionaries({"cron": st.sampled_from(["0 2 * * *", ["*/5 * * * *"]])}),
    },
)


@given(CONFIGS)
def test_a_spec_shown_as_a_run_file_reads_back_as_the_same_spec(config: dict[str, Any]) -> None:
    spec = resolve(parse_run_file(config), None).spec
    assert resolve(parse_run_file(spec.as_file()), None).spec == spec
    assert EffectiveSpec.model_validate_json(spec.model_dump_json()) == spec
