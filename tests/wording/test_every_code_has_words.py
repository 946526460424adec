"""Every code of every catalogue has words, and all of them go through gettext."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from django.utils import translation

from dstackweb.backends.contract import Availability, InstanceEnd, LaunchFailure, PlaceCode
from dstackweb.backends.models import CgroupCode, EngineCode, HostEvent, HostEventKind, Isolation
from dstackweb.gpus.selectors import ThrottleReason
from dstackweb.progress.states import TaskState
from dstackweb.runner.archive import Fault
from dstackweb.runner.engine import EngineFault
from dstackweb.runner.images import ImageFault
from dstackweb.runner.limits import ArtifactLeft
from dstackweb.runs.codes import (
    Impossible,
    LimitCode,
    LogCut,
    MessageCode,
    PlanNote,
    ReservationEnd,
    RunEventKind,
    ScheduleWait,
    StartBasis,
    Unavailable,
    WaitReason,
)
from dstackweb.runs.models import RunEvent
from dstackweb.runs.notification_codes import DeliveryProblem, NotificationEvent, QueueStuck
from dstackweb.runs.service_codes import CheckFailure, GatewayProblem, ServiceState
from dstackweb.runs.states import JobStatus, Reason, RunStatus
from dstackweb.scheduler.placement.hosts import Wait
from dstackweb.spec.codes import UtilizationAction, UtilizationScope
from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.wording import (
    events,
    gateway,
    hosts,
    notifications,
    offers,
    places,
    policy,
    progress,
    queue,
    starts,
    statuses,
    storage,
    waiting,
)
from dstackweb.wording.sentence import words

AT = "2031-05-04T09:30:00+00:00"
DATA: dict[str, Any] = {
    "from": 2, "to": 1, "priority": [50, 50], "target": "top", "queue": "default", "hosts": ["box-1"], "at": AT,
    "gpu": 1, "node": 0, "nodes": 1, "min": 50, "window_s": 1800, "low_since": AT, "stops_at": AT, "until": AT,
    "cloud_id": "i-1", "price": "1.5", "backend": "aws", "region": "eu", "instance_type": "g5.xlarge",
    "by_s": 60, "total_s": 120, "cpus": 2, "memory_mib": 2048, "set": {"disk": "nvme"}, "code": "no_capacity",
    "short": ["gpus"], "gpus": 2, "gpus_free": 0, "gpus_total": 1, "limit": 1, "used": 1, "asked": 2,
    "budget": "100", "spent": "100", "starts_at": AT, "expires_at": None, "backends": ["aws"], "offers": 1,
    "reason": "stopped_by_user", "exit_code": 127, "deadline_s": 60, "host": "box-1", "silent_s": 600, "seen": 1,
    "total": 8, "waits_for": "i", "kind": "aws", "error": {"code": "failed", "text": "i"},
    "idle_s": 3000, "limit_s": 3600, "before": "starting", "after_s": 10, "failures": 3,
    "prefix": "i", "failed": 20, "ended": 100, "now": 20, "was": 1,
}  # fmt: skip
OF_HOSTS = {**DATA, "error": "i", "reason": "i"}
OF_KIND: dict[RunEventKind, dict[str, Any]] = {
    RunEventKind.PROVISIONING: {"nodes": [{"host": "box-1", "gpus": 2}]},
    RunEventKind.LOG_CUT: {"why": "job_limit", "limit": 1 << 30},
    RunEventKind.UTILIZATION_KEPT: {"reason": "100 %"},
    RunEventKind.SERVICE_UNHEALTHY: {"error": "status", "error_data": {"status": 503}},
}


def _event(kind: RunEventKind, **data: Any) -> str:
    more = OF_KIND.get(kind, {})
    return events.event_text(RunEvent(kind=kind, data={**DATA, **more, **data}), nodes=1)


def _wait(reason: WaitReason) -> str:
    return waiting.reason(reason, {**DATA, "code": "max_running"}).text + waiting.shared(reason, "2", 3)


def _notified(code: NotificationEvent) -> tuple[str, str]:
    data = {
        "run": "g",
        "status": "failed",
        "reason": "job_failed",
        "waited_s": 600,
        "by": "ann",
        "project": "g",
        "percent": 80,
        "spent": "85",
        "budget": "100",
        "queue": "default",
        "code": "paused",
        "waiting": 2,
        "backend": "aws",
        "api": "EC2",
        "requests": 20,
        "throttles": 0,
        "tight": 4,
        "backend_kind": "aws",
        "region": "eu",
        "failure": {"code": "throttled"},
        "host": "box",
        "error": "disk",
        "kind": "utilization_notice",
    }
    return notifications.notification(code, {**data, "data": {**DATA, "reason": "100 %"}})[:2]


def _policy(**terms: Any) -> UtilizationPolicy:
    return UtilizationPolicy(min_gpu_utilization=10, time_window_s=1800, **terms)


CATALOGUES: dict[type[Enum], Callable[[Any], str]] = {
    RunStatus: statuses.status,
    JobStatus: statuses.status,
    Reason: statuses.termination,
    LaunchFailure: statuses.instance_end,
    InstanceEnd: statuses.instance_end,
    WaitReason: _wait,
    Impossible: lambda code: waiting.reason(WaitReason.IMPOSSIBLE, {**DATA, "code": code}).text,
    Unavailable: lambda code: waiting.reason(WaitReason.BACKEND_UNAVAILABLE, {**DATA, "code": code}).text,
    LimitCode: queue.setting,
    PlaceCode: lambda code: places.tried(code, {**DATA, "asked": ["eu"]}).label,
    Availability: lambda code: offers.availability(code).label,
    RunEventKind: _event,
    PlanNote: waiting.plan_note,
    ArtifactLeft: lambda code: storage.left_out(code.value),
    LogCut: lambda code: _event(RunEventKind.LOG_CUT, why=code),
    ReservationEnd: lambda code: _event(RunEventKind.RESERVATION_ENDED, reason=code),
    MessageCode: lambda code: statuses.message({**DATA, "code": code}, ""),
    ImageFault: lambda code: statuses.image_pull_failed({"image": "X:1", "fault": code.value}),
    EngineFault: lambda code: statuses.no_engine({"fault": code.value}),
    Fault: lambda code: statuses.code_refused({**DATA, "fault": code.value}),
    StartBasis: lambda code: " ".join(starts.basis(code, {**DATA, "prefix": "g", "reason": "no_quota"})[:2]),
    ScheduleWait: lambda code: _event(RunEventKind.SCHEDULE_WAITS, reason=code),
    HostEventKind: lambda kind: hosts.event_text(HostEvent(kind=kind, data=OF_HOSTS)),
    Isolation: hosts.isolation,
    CgroupCode: hosts.no_cgroups,
    EngineCode: hosts.no_engine,
    ThrottleReason: policy.throttled,
    UtilizationAction: lambda code: policy.rule(_policy(action=code)),
    UtilizationScope: lambda code: policy.rule(_policy(scope=code)),
    TaskState: progress.state,
    ServiceState: gateway.service_state,
    CheckFailure: lambda code: gateway.check_failure(code.value, {**DATA, "port": 1, "timeout_s": 5, "text": "i"}),
    GatewayProblem: lambda code: " ".join(gateway.problem(code, {"name": "g", "port": 1, "status": "failed"})[:2]),
    DeliveryProblem: notifications.problem,
    QueueStuck: notifications.queue_stuck,
    NotificationEvent: lambda code: " ".join((notifications.event_name(code), *_notified(code))),
}
CODES = [(words, code) for catalogue, words in CATALOGUES.items() for code in catalogue]
OF_LIMITS = [
    (reason, {**DATA, "code": code, "never": never})
    for reason in (WaitReason.USER_LIMIT, WaitReason.QUEUE_LIMIT)
    for code in LimitCode
    for never in (False, True)
]
OF_DATA = {"ann", "box", "aws", "eu", "g", "h", "xlarge", "default", "nvme", "disk", "i", "min", "max", "duration", "m"}


@pytest.fixture
def _shouted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A language in which everything is in upper case, but for the names of values."""

    def shout(text: str) -> str:
        return re.sub(r"%\(\w+\)[sd]|%[sd%]|[^%]+", lambda m: m[0] if m[0].startswith("%") else m[0].upper(), text)

    def shout_many(one: str, more: str, n: int) -> str:
        return shout(one if n == 1 else more)

    monkeypatch.setattr(translation._trans, "gettext", shout, raising=False)
    monkeypatch.setattr(translation._trans, "ngettext", shout_many, raising=False)


@pytest.mark.usefixtures("_shouted")
@pytest.mark.parametrize(("words", "code"), CODES, ids=lambda value: str(getattr(value, "value", "")))
def test_a_code_has_words_of_the_readers_language(words: Callable[[Any], str], code: Any) -> None:
    """A code that is shown as it is would be in lower case."""
    text = words(code)
    assert text
    assert not [word for word in re.findall(r"[a-z]+", text) if word not in OF_DATA], text


@pytest.mark.parametrize(("reason", "data"), OF_LIMITS)
def test_each_limit_is_worded_with_its_numbers(reason: WaitReason, data: dict[str, Any]) -> None:
    text = waiting.reason(reason, data).text
    assert text != "a limit is reached"
    assert any(digit in text for digit in "0123456789")


def test_a_code_of_a_newer_server_is_shown_as_it_is() -> None:
    assert events.event_text(RunEvent(kind="moved_to_the_moon", data={}), nodes=1) == "moved to the moon"
    assert waiting.reason("full_moon", {}).label == places.tried("full_moon", {}).label == "full moon"
    assert hosts.event_text(HostEvent(kind="full_moon", data={})) == "full moon"
    assert statuses.termination("full_moon") == statuses.instance_end("full_moon") == "full moon"


def test_a_wait_needs_a_reason_of_the_catalogue() -> None:
    with pytest.raises(ValueError, match="maintenance"):
        Wait("maintenance")  # type: ignore[arg-type]


def test_a_table_of_words_that_misses_a_code_cannot_be_made() -> None:
    with pytest.raises(LookupError, match="JobStatus DONE"):
        words({status: status.value for status in JobStatus if status != JobStatus.DONE})
