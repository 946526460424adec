"""A run file is read in full, or refused with every error, each with its place, its line and what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.lib.errors import FieldError, Invalid
from dstackweb.spec.run_file import RunFile, parse_profile_settings, parse_run_file
from dstackweb.spec.units import Range

HEAD = "type: task\ncommands: [a]\n"

FULL = """\
type: task
name: train-llama
commands: [python train.py]
env: {LR: "1e-4"}
nodes: 2
resources: {cpu: 2.., memory: 8GB.., gpu: A100:40GB:2}
priority: 70
queue: default
profile: nightly
utilization_policy: {min_gpu_utilization: 10, time_window: 30m}
retry: {on_events: [interruption], duration: 4h}
schedule: {cron: "0  2 * * 1-5"}
max_duration: off
stop_duration: 1m
idle_duration: 10m
max_price: 1.5
spot_policy: auto
backends: [hosts, aws, hosts]
regions: [eu-west-1]
instance_types: [p4d.24xlarge]
preemptible: true
working_dir: src
shell: bash
image: python:3.12
"""


def errors_of(config: Any, **more: Any) -> list[FieldError]:
    with pytest.raises(Invalid) as caught:
        parse_run_file(config, **more)
    return caught.value.errors


def error_of(config: Any, **more: Any) -> FieldError:
    [error] = errors_of(config, **more)
    return error


def test_every_key_is_read() -> None:
    """R16: a utilization policy with its minimum and window is read in full."""
    fields = parse_run_file(FULL).fields
    policy, retry, resources = fields.utilization_policy, fields.retry, fields.resources
    assert policy is not None
    assert retry is not None
    assert resources is not None
    assert resources.gpu is not None
    assert (policy.min_gpu_utilization, policy.time_window) == (10, 1800)
    assert (policy.scope, policy.warmup, policy.action) == ("any", 0, "terminate")
    assert (retry.on_events, retry.duration) == (("interruption",), 4 * 3600)
    assert (resources.cpu, resources.memory) == (Range(2, None), Range(8192, None))
    assert (resources.gpu.name, resources.gpu.memory, resources.gpu.count) == (
        ("A100",),
        Range(40960, 40960),
        Range(2, 2),
    )
    assert fields.schedule is not None
    assert fields.schedule.cron == ("0 2 * * 1-5",)
    assert (fields.max_duration, fields.stop_duration, fields.idle_duration) == (None, 60, 600)
    assert "max_duration" in fields.model_fields_set
    assert fields.backends == ("hosts", "aws")
    assert (fields.shell, fields.priority, fields.max_price) == ("/bin/bash", 70, 1.5)
    assert parse_run_file(FULL).line("utilization_policy") == 10


def test_an_object_and_its_yaml_are_equal() -> None:
    config = {
        "type": "task",
        "commands": ["a"],
        "env": {"N": 1, "F": 1.5, "B": True},
        "resources": {"cpu": 2, "gpu": 1},
    }
    read = parse_run_file(config)
    text = parse_run_file("type: task\ncommands: [a]\nenv: {N: 1, F: 1.5, B: true}\nresources: {cpu: 2, gpu: 1}")
    assert read.fields == text.fields
    assert read.env == text.env == {"N": "1", "F": "1.5", "B": "true"}
    assert read.lines == {}


@pytest.mark.parametrize(
    ("lines", "loc", "says"),
    [
        ("priority: 101", ["priority"], "`priority` should be a whole number from 0 to 100, not 101"),
        ("priority: -1", ["priority"], "from 0 to 100, not -1"),
        ("priority: true", ["priority"], "not true"),
        ("priority: 50.0", ["priority"], "not 50.0"),
        ("priority: high", ["priority"], 'not "high"'),
        ("priority: '50'", ["priority"], 'not "50"'),
        ("nodes: 0", ["nodes"], "from 1 to 1000, not 0"),
        ("nodes: 1001", ["nodes"], "not 1001"),
        ("nodes: [1]", ["nodes"], "not a list"),
        ("name: 9lives", ["name"], "with a letter first"),
        ("name: 123", ["name"], "not 123"),
        ("name: Train", ["name"], "lower-case"),
        ("name: a_b", ["name"], "'a_b' is not valid"),
        (f"name: {'a' * 61}", ["name"], "up to 60"),
        ("name: aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee", ["name"], "the id of a run"),
        ("shell: fish", ["shell"], "'fish' is not valid"),
        ("working_dir: ''", ["working_dir"], "the text is empty"),
        ("image: --privileged", ["image"], "container image"),
        ("image: a b", ["image"], "container image"),
        ("preemptible: 1", ["preemptible"], "true or false, not 1"),
        ("queue: 3", ["queue"], "a queue's name, not 3"),
        ("backends: []", ["backends"], "not an empty list"),
        ("backends: hosts", ["backends"], 'such as [hosts], not "hosts"'),
        ("regions: [3]", ["regions", 0], "`regions.0` should be text, not 3"),
        ("instance_types: ['']", ["instance_types", 0], "the text is empty"),
        ("spot_policy: cheap", ["spot_policy"], '`spot`, `on-demand` or `auto`, not "cheap"'),
        ("max_price: -1", ["max_price"], "dollars per hour such as 1.5, not -1"),
        ("max_price: .nan", ["max_price"], 'not ".nan"'),
        ("max_price: true", ["max_price"], "not true"),
        ("max_duration: 1x", ["max_duration"], "or off: '1x' is not a duration"),
        ("max_duration: 0", ["max_duration"], "not 0"),
        ("max_duration: on", ["max_duration"], "or off"),
        ("max_duration: true", ["max_duration"], "or off, not true"),
        ("stop_duration: off", ["stop_duration"], "at most 24h"),
        ("stop_duration: 2d", ["stop_duration"], 'not "2d"'),
        ("idle_duration: {}", ["idle_duration"], "not a mapping"),
        ("retry: 3", ["retry"], "true, false, or a mapping"),
        ("retry: {on_events: []}", ["retry", "on_events"], "not an empty list"),
        ("retry: {on_events: [crash]}", ["retry", "on_events", 0], "'no-capacity', 'interruption' or 'error'"),
        ("retry: {duration: 0s}", ["retry", "duration"], "such as 4h or 7d"),
        ("utilization_policy: 10", ["utilization_policy"], "a mapping with `min_gpu_utilization`"),
        (
            "utilization_policy: {min_gpu_utilization: 101, time_window: 5m}",
            ["utilization_policy", "min_gpu_utilization"],
            "percent from 0 to 100, not 101",
        ),
        (
            "utilization_policy: {min_gpu_utilization: 1, time_window: 59s}",
            ["utilization_policy", "time_window"],
            'at least 1m, such as 30m, not "59s"',
        ),
        ("utilization_policy: {min_gpu_utilization: 1}", ["utilization_policy", "time_window"], "is missing"),
        ("schedule: {cron: '* * * *'}", ["schedule", "cron", 0], "has 4 fields"),
        ("schedule: {cron: '0 * * * * *'}", ["schedule", "cron", 0], "has 6 fields"),
        ("schedule: {cron: '61 * * * *'}", ["schedule", "cron", 0], "out of range"),
        ("schedule: {cron: '0 0 30 2 *'}", ["schedule", "cron", 0], "not a cron expression"),
        ("schedule: {cron: 'R * * * *'}", ["schedule", "cron", 0], "has R or H"),
        ("schedule: {}", ["schedule", "cron"], "is missing; it should be a cron expression"),
        ("resources: {cpu: 4..2}", ["resources", "cpu"], "4..2 starts above its end"),
        ("resources: {cpu: 0}", ["resources", "cpu"], "greater than zero"),
        ("resources: {cpu: 1.5}", ["resources", "cpu"], "not a whole number"),
        ("resources: {cpu: [1]}", ["resources", "cpu"], "not a list"),
        ("resources: {memory: 8XB}", ["resources", "memory"], "not a size such as 8GB"),
        ("resources: {memory: ..0GB}", ["resources", "memory"], "greater than zero"),
        ("resources: {gpu: amd}", ["resources", "gpu"], "only NVIDIA"),
        ("resources: {gpu: true}", ["resources", "gpu"], "not true"),
        ("resources: {gpu: {count: x}}", ["resources", "gpu", "count"], "not a whole number"),
        ("resources: {gpu: {name: []}}", ["resources", "gpu", "name"], "not an empty list"),
        ("env: 3", ["env"], "a mapping such as {LR: 0.1}"),
        ("env: {A: }", ["env", "A"], 'write "" for an empty value'),
        ("env: {A: [1]}", ["env", "A"], "text or a number"),
        ("env: {1A: x}", ["env", "1A"], "not a valid variable name"),
        ("env: {DSTACK_RUN_ID: x}", ["env", "DSTACK_RUN_ID"], "is set by dstackweb"),
        ("env: {CUDA_VISIBLE_DEVICES: ''}", ["env", "CUDA_VISIBLE_DEVICES"], "is set by dstackweb"),
        ("env: [A=1, A=2]", ["env", 1], "given twice"),
        ("env: [A=1, {B: 2}]", ["env", 1], "NAME=value"),
        ("env: {A: '${{ run.name }}'}", ["env", "A"], "only ${{ secrets.NAME }}"),
        ("env: {A: '${{ secrets.X'}", ["env", "A"], "only ${{ secrets.NAME }}"),
        ("working_dir: ${{ secrets.DIR }}", ["working_dir"], "in `env`"),
        ("priority:", ["priority"], "`priority` has no value"),
        ("resources: {gpu: }", ["resources", "gpu"], "`resources.gpu` has no value"),
        ("comands: [a]", ["comands"], "unknown key `comands`; did you mean `commands`?"),
        ("Priority: 3", ["Priority"], "did you mean `priority`?"),
        ("zzz: 3", ["zzz"], "known keys"),
        ("resources: {cpus: 3}", ["resources", "cpus"], "did you mean `resources.cpu`?"),
        ("retry: {durations: 3h}", ["retry", "durations"], "did you mean `retry.duration`?"),
        ("services: {}", ["services"], "`services` is not supported: "),
        ("ports: [80]", ["ports"], "`ports` is not supported: "),
        ("resources: {shm_size: 8GB}", ["resources", "shm_size"], "/dev/shm"),
        ("resources: {disk: 8GB}", ["resources", "disk"], "not supported"),
        ("resources: {gpu: {vendor: nvidia}}", ["resources", "gpu", "vendor"], "remove this key"),
        ("<<: {priority: 3}", ["<<"], "unknown key"),
    ],
)
def test_each_error_has_its_path_line_and_expectation(lines: str, loc: list[str | int], says: str) -> None:
    error = error_of(HEAD + lines)
    assert error["loc"] == loc
    assert error["line"] == 3
    assert says in error["msg"]


@pytest.mark.parametrize(
    ("config", "loc", "line", "says"),
    [
        ("type: task", ["commands"], None, "`commands` is missing; it should be a list of shell commands"),
        ("commands: [a]", ["type"], None, "`type` is missing; it should be `task`"),
        ("type: task\ncommands: []", ["commands"], 2, "at least one, not an empty list"),
        ("type: task\ncommands: python x.py", ["commands"], 2, 'a list of shell commands, at least one, not "python'),
        ("type: task\ncommands:\n- a\n- ' '", ["commands", 1], 4, "the text is empty"),
        ("type: task\ncommands:\n- a\n- echo a: b", ["commands", 1], 4, "quote text that contains `: `"),
        ("type: task\ncommands:\n- echo ${{ secrets.KEY }}", ["commands", 0], 3, "`env`"),
        ("type: fleet\ncommands: [a]", ["type"], 1, "`type: fleet` is not supported: add hosts"),
        ("type: service\ncommands: [a]", ["port"], None, "`port` is missing; it should be the port on which"),
        ("type: service\ncommands: [a]\nport: 70000", ["port"], 3, "`port` should be a port number from 1 to 65535"),
        ("type: service\ncommands: [a]\nport: 80\nnodes: 2", ["nodes"], 4, "not for services: it has one node"),
        ("type: service\ncommands: [a]\nport: 80\narray: 2", ["array"], 4, "submit a file for each"),
        ("type: service\ncommands: [a]\nport: 80\nschedule: {cron: 0 2 * * *}", ["schedule"], 4, "when you need it"),
        ("type: service\ncommands: [a]\nport: 80\nreplicas: 2", ["replicas"], 4, "a service has one replica"),
        ("type: service\ncommands: [a]\nport: 80\nauth: false", ["auth"], 4, "give programs an API token"),
        ("type: service\ncommands: [a]\nport: 80\nide: vscode", ["ide"], 4, "it needs `type: dev-environment`"),
        ("type: service\nport: 80", ["commands"], None, "`commands` is missing"),
        ("type: task\ncommands: [a]\nport: 80", ["port"], 3, "it needs `type: service`"),
        ("type: task\ncommands: [a]\ninactivity_duration: 1h", ["inactivity_duration"], 3, "not for tasks"),
        (
            "type: service\ncommands: [a]\nport: 80\nhealth_check: health",
            ["health_check", "path"],
            4,
            "'health' does not begin with one slash",
        ),
        (
            "type: service\ncommands: [a]\nport: 80\nhealth_check: {timeout: 2m}",
            ["health_check", "timeout"],
            4,
            "a duration of at most 1m",
        ),
        ("type: dev-environment\ncommands: [a]", ["commands"], 2, "put what has to run first into `init`"),
        ("type: dev-environment\nnodes: 2", ["nodes"], 2, "is for tasks, not for dev environments"),
        ("type: task\ncommands: [a]\ninit: [b]", ["init"], 3, "it needs `type: dev-environment`"),
        ("type: task\ncommands: [a]\nide: jupyter", ["ide"], 3, "it needs `type: dev-environment`"),
        ("type: dev-environment\nide: emacs", ["ide"], 2, '`ide` should be `vscode` or `jupyter`, not "emacs"'),
        ("type: dev-environment\ninit: []", ["init"], 2, "at least one, not an empty list"),
        ("type: job\ncommands: [a]", ["type"], 1, '`type` should be `task`, `dev-environment` or `service`, not "job"'),
        ({"type": "task", "commands": [True]}, ["commands", 0], None, "`commands.0` should be text, not true"),
        ({"type": "task", "commands": ["a"], "name": None}, ["name"], None, "has no value"),
    ],
)
def test_errors_in_required_keys_are_clear(config: Any, loc: list[str | int], line: int | None, says: str) -> None:
    error = error_of(config)
    assert error["loc"] == loc
    assert error["line"] == line
    assert says in error["msg"]


def test_all_errors_are_reported_in_the_order_of_the_file() -> None:
    errors = errors_of("comands: [a]\ntype: task\npriority: 200\nnodes: 0\n")
    assert [(error["line"], error["loc"]) for error in errors] == [
        (1, ["comands"]),
        (3, ["priority"]),
        (4, ["nodes"]),
        (None, ["commands"]),
    ]


def test_the_detail_is_the_first_error_and_how_many_follow() -> None:
    with pytest.raises(Invalid) as caught:
        parse_run_file(HEAD + "priority: 200\nnodes: 0")
    assert caught.value.detail == "`priority` should be a whole number from 0 to 100, not 200 (and 1 more)"


def test_a_python_f_string_in_a_command_is_no_secret() -> None:
    assert parse_run_file("type: task\ncommands:\n- |\n  print(f'${{price}}')")


@pytest.mark.parametrize("value", [0, 50, 100])
def test_priorities_from_0_to_100(value: int) -> None:
    """R22."""
    assert parse_run_file(HEAD + f"priority: {value}").fields.priority == value


def test_env_takes_a_mapping_or_a_list() -> None:
    assert parse_run_file(HEAD + "env: {A: 1, B: '${{ secrets.KEY }}'}").env == {"A": "1", "B": "${{ secrets.KEY }}"}
    assert parse_run_file(HEAD + "env: [A=1, B=x=y, C=]").env == {"A": "1", "B": "x=y", "C": ""}


def test_a_bare_name_takes_the_clients_value_and_is_masked() -> None:
    read = parse_run_file(HEAD + "env:\n- A=1\n- HF_TOKEN", client_env={"HF_TOKEN": "hf_123", "OTHER": "x"})
    assert read.env == {"A": "1"}
    assert read.masked_env == {"HF_TOKEN"}
    assert "hf_123" not in repr(read)


@pytest.mark.parametrize(("client_env", "says"), [({}, "export it before `dstackweb apply`"), ({"T": "a\0b"}, "NUL")])
def test_a_bare_name_without_a_usable_value_is_refused(client_env: dict[str, str], says: str) -> None:
    error = error_of(HEAD + "env:\n- A=1\n- T", client_env=client_env)
    assert (error["loc"], error["line"]) == (["env", 1], 5)
    assert says in error["msg"]


def overridden(overrides: dict[str, Any], text: str = HEAD + "priority: 30\nenv: [A=1, T]\n") -> RunFile:
    return parse_run_file(text, client_env={"T": "t"}, overrides=overrides)


def test_the_command_line_overrides_the_file() -> None:
    """R26: a priority set in the command line."""
    read = overridden({"priority": 90, "name": "urgent"})
    assert (read.fields.priority, read.fields.name) == (90, "urgent")
    assert read.overridden == {"priority", "name"}
    assert read.line("priority") is None
    assert read.line("commands") == 2


def test_variables_of_the_command_line_are_merged_and_shown() -> None:
    read = overridden({"env": {"A": "2", "T": "mine", "NEW": "3"}})
    assert read.env == {"A": "2", "T": "mine", "NEW": "3"}
    assert read.masked_env == frozenset()


@pytest.mark.parametrize(
    ("overrides", "loc"),
    [({"priority": 101}, ["priority"]), ({"env": {"1": "x"}}, ["env", "1"]), ({"env": 3}, ["env"])],
)
def test_errors_of_the_command_line_have_no_line(overrides: dict[str, Any], loc: list[str]) -> None:
    with pytest.raises(Invalid) as caught:
        overridden(overrides)
    assert (caught.value.errors[0]["loc"], caught.value.errors[0]["line"]) == (loc, None)


def test_keys_replaced_on_the_command_line_may_be_invalid_in_the_file() -> None:
    assert overridden({"priority": 1}, HEAD + "priority: 1000\n").fields.priority == 1


@pytest.mark.parametrize(("value", "on_events"), [("true", 3), ("{}", 3), ("{on_events: [error]}", 1)])
def test_retry_means_all_events_unless_it_names_some(value: str, on_events: int) -> None:
    retry = parse_run_file(HEAD + f"retry: {value}").fields.retry
    assert retry is not None
    assert len(retry.on_events) == on_events
    assert retry.duration == 3600


def test_no_retry_is_a_value_too() -> None:
    fields = parse_run_file(HEAD + "retry: false").fields
    assert fields.retry is None
    assert "retry" in fields.model_fields_set


@pytest.mark.parametrize("cron", ["'0 2 * * *'", "['0 2 * * *', '*/5 * * mar thu']"])
def test_a_schedule_has_one_or_more_expressions(cron: str) -> None:
    assert parse_run_file(HEAD + f"schedule: {{cron: {cron}}}").fields.schedule


def test_a_profiles_settings_are_the_same_fields() -> None:
    """R16: a policy in a profile."""
    fields = parse_profile_settings({"utilization_policy": {"min_gpu_utilization": 50, "time_window": "1m"}})
    assert fields.utilization_policy is not None
    assert fields.utilization_policy.time_window == 60


@pytest.mark.parametrize("key", ["commands", "priority", "env", "resources"])
def test_a_profile_sets_no_key_of_the_run_itself(key: str) -> None:
    with pytest.raises(Invalid, match=f"unknown key `{key}`"):
        parse_profile_settings({key: 1})
