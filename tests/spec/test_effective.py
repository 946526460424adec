"""The stored spec: it survives JSON, and decides which runs share a shape."""

from __future__ import annotations

from uuid import uuid4

import pytest

from dstackweb.backends.contract import LaunchSpec
from dstackweb.spec.effective import MASK, EffectiveSpec, Requirements, Retry, UtilizationPolicy

SPEC = EffectiveSpec(
    commands=("a",),
    backends=("hosts", "aws"),
    retry=Retry(on_events=("error",), duration_s=3600),
    utilization_policy=UtilizationPolicy(min_gpu_utilization=10, time_window_s=1800),
    max_duration_s=86400,
    labels={"region": ("eu", "us")},
)


def test_a_spec_survives_json() -> None:
    assert EffectiveSpec.model_validate(SPEC.model_dump(mode="json")) == SPEC
    assert EffectiveSpec.model_validate_json(SPEC.model_dump_json()) == SPEC


def test_the_defaults() -> None:
    """R22: priority 50."""
    spec = EffectiveSpec(commands=("a",))
    assert (spec.priority, spec.queue, spec.nodes, spec.shell) == (50, "default", 1, "/bin/sh")
    assert (spec.max_duration_s, spec.stop_duration_s, spec.retry, spec.preemptible) == (None, 20, None, False)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"commands": ("b",)},
        {"env": {"LR": "0.1"}},
        {"priority": 90},
        {"queue": "night"},
        {"retry": None},
        {"labels": {"region": ("us", "eu")}},
    ],
)
def test_runs_of_a_sweep_share_a_shape(change: dict[str, object]) -> None:
    assert SPEC.model_copy(update=change).shape_key(1) == SPEC.shape_key(1)


@pytest.mark.parametrize(
    "change",
    [
        {"requirements": Requirements(cpu_min=2)},
        {"nodes": 2},
        {"backends": ("hosts",)},
        {"backends": ("aws", "hosts")},
        {"backends": None},
        {"regions": ("eu-west-1",)},
        {"instance_types": ("p4d.24xlarge",)},
        {"labels": {"disk": ("nvme",)}},
        {"spot_policy": "spot"},
        {"max_price": 1.0},
        {"max_duration_s": None},
        {"preemptible": True},
        {"image": "python:3.12"},
    ],
)
def test_every_field_that_affects_placement_changes_the_shape(change: dict[str, object]) -> None:
    assert SPEC.model_copy(update=change).shape_key(1) != SPEC.shape_key(1)


def test_another_user_has_other_shapes() -> None:
    assert SPEC.shape_key(1) != SPEC.shape_key(2)
    assert len(SPEC.shape_key(1)) == 64


def test_masked_values_show_as_asterisks() -> None:
    shown = SPEC.model_copy(update={"env": {"A": "1"}, "masked_env": ("TOKEN",)}).as_file()
    assert shown["env"] == {"A": "1", "TOKEN": MASK}


def test_a_launch_spec_never_shows_its_token() -> None:
    launch = LaunchSpec(uuid4(), uuid4(), 0, "http://127.0.0.1:8000", "s3cret")
    assert "s3cret" not in repr(launch)
