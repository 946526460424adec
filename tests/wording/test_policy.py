from __future__ import annotations

from typing import Any

import pytest

from dstackweb.runs.models import RunEvent
from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.wording import events as event_words, policy as policy_words, units

LOW = {
    "gpu": 1, "node": 0, "nodes": 1, "min": 50, "window_s": 1800, "scope": "any",
    "low_since": "2026-01-05T10:00:00+00:00",
}  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (60, "1 min"),
        (90, "90 s"),
        (1800, "30 min"),
        (3600, "1 h"),
        (5400, "1 h 30 min"),
        (86_400, "1 d"),
        (88_200, "1470 min"),
    ],
)
def test_a_window_is_shown_exactly(seconds: int, text: str) -> None:
    assert units.exact_duration(seconds) == text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "GPU 1 was below 50 % for 30 min"),
        ({"nodes": 4, "node": 2}, "GPU 1 of node 2 was below 50 % for 30 min"),
        ({"gpu": None, "scope": "all"}, "All GPUs were below 50 % for 30 min"),
        ({"gpu": None, "scope": "all", "nodes": 2}, "All GPUs of node 0 were below 50 % for 30 min"),
    ],
)
def test_the_low_gpus_are_named(changed: dict[str, Any], text: str) -> None:
    assert policy_words.was_low(LOW | changed) == text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "Stop the run when a GPU stays below 10 % for 30 min."),
        ({"scope": "all"}, "Stop the run when all GPUs of a node stay below 10 % for 30 min."),
        (
            {"action": "notify", "warmup_s": 600},
            "Notify when a GPU stays below 10 % for 30 min, not counting the first 10 min.",
        ),
    ],
)
def test_a_policy_is_a_sentence(changed: dict[str, Any], text: str) -> None:
    policy = UtilizationPolicy.model_validate({"min_gpu_utilization": 10, "time_window_s": 1800} | changed)
    assert policy_words.rule(policy) == text


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        (
            "utilization_notice",
            LOW | {"stops_at": "2026-01-05T10:30:00+00:00"},
            "GPU 1 has been below 50 % since 2026-01-05 10:00 UTC; "
            "the run stops at 2026-01-05 10:30 UTC unless it is used",
        ),
        ("utilization_stop", LOW, "stopped by its utilization policy: GPU 1 was below 50 % for 30 min"),
        (
            "utilization_stop",
            LOW | {"next": "train-7"},
            "stopped by its utilization policy: GPU 1 was below 50 % for 30 min; first in the queue now: train-7",
        ),
        (
            "utilization_would_stop",
            LOW | {"notifies": True},
            "its utilization policy would have stopped it: GPU 1 was below 50 % for 30 min (the policy only notifies)",
        ),
        (
            "utilization_would_stop",
            LOW,
            "its utilization policy would have stopped it: GPU 1 was below 50 % for 30 min (policies here only report)",
        ),
        (
            "utilization_kept",
            {"until": "2026-01-05T11:00:00+00:00", "reason": "100 % of the data loads"},
            "exempt from its policy until 2026-01-05 11:00 UTC: “100 % of the data loads”",
        ),
        ("utilization_next", {"run": "train-7"}, "its GPUs went to train-7"),
        ("utilization_next", {}, "its GPUs went to a run of another project"),
        ("utilization_policy_changed", {"after": None}, "its utilization policy was removed"),
    ],
)
def test_events_are_worded(kind: str, data: dict[str, Any], text: str) -> None:
    assert event_words.event_text(RunEvent(kind=kind, data=data, node=0), nodes=4) == text
