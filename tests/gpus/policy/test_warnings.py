from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dstackweb.gpus.window import (
    UNKNOWN,
    USED,
    Enforcement,
    PolicyAction,
    PolicyVerdict,
    VerdictKind,
    next_action,
    notice_before,
    stop_warning,
)

MINUTE = 60_000
HOUR = 60 * MINUTE


def low(stops_ms: int, now_ms: int, since_ms: int = 0) -> PolicyVerdict:
    return PolicyVerdict(VerdictKind.STOP if now_ms >= stops_ms else VerdictKind.KEEP, since_ms, stops_ms, 0)


def case(
    window_ms: int = HOUR,
    *,
    reports_only: bool = False,
    noticed_ms: int | None = None,
    acted_ms: int | None = None,
    paused_until_ms: int | None = None,
) -> Enforcement:
    return Enforcement(window_ms, noticed_ms, acted_ms, reports_only, paused_until_ms)


@pytest.mark.parametrize(
    ("window", "before"),
    [(1, None), (3, None), (4, 2), (8, 2), (12, 3), (40, 10), (60, 10), (24 * 60, 10)],
)
def test_a_notice_comes_when_a_quarter_of_the_window_remains_within_bounds(window: int, before: int | None) -> None:
    assert notice_before(window * MINUTE) == (None if before is None else before * MINUTE)


@pytest.mark.parametrize(
    ("now", "badge", "notice"), [(29, False, False), (30, True, False), (49, True, False), (50, True, True)]
)
def test_the_badge_comes_with_half_the_window_and_the_notice_later(now: int, badge: bool, notice: bool) -> None:
    found = stop_warning(low(HOUR, now * MINUTE), HOUR, None, now * MINUTE)
    assert (found.badge, found.notice, found.stops_ms) == (badge, notice, HOUR)


def test_a_kept_run_is_stopped_only_after_its_exemption() -> None:
    now = 59 * MINUTE
    found = stop_warning(low(HOUR, now), HOUR, 2 * HOUR, now)
    assert (found.badge, found.notice, found.stops_ms) == (True, False, 2 * HOUR)


@pytest.mark.parametrize("verdict", [USED, UNKNOWN])
@given(now_ms=st.integers(0, 2**45), paused=st.none() | st.integers(0, 2**45))
def test_a_used_or_unknown_gpu_causes_no_warning_and_no_stop(
    verdict: PolicyVerdict, now_ms: int, paused: int | None
) -> None:
    assert next_action(case(paused_until_ms=paused), verdict, now_ms) == PolicyAction.NOTHING
    assert stop_warning(verdict, HOUR, paused, now_ms).stops_ms is None


@given(
    now_ms=st.integers(0, 3 * HOUR),
    paused=st.none() | st.integers(0, 3 * HOUR),
    reports_only=st.booleans(),
    noticed=st.none() | st.just(0),
    acted=st.none() | st.just(0),
)
def test_a_run_is_stopped_after_its_window_unless_it_is_kept(
    now_ms: int, paused: int | None, reports_only: bool, noticed: int | None, acted: int | None
) -> None:
    asked = case(reports_only=reports_only, noticed_ms=noticed, acted_ms=acted, paused_until_ms=paused)
    found = next_action(asked, low(HOUR, now_ms), now_ms)
    over = now_ms >= HOUR and (paused is None or now_ms >= paused)
    assert (found == PolicyAction.STOP) == (over and not reports_only)
    assert (found == PolicyAction.WOULD_STOP) == (over and reports_only and acted is None)
    if found == PolicyAction.NOTICE:
        assert (reports_only, noticed, over) == (False, None, False)
        assert now_ms >= max(HOUR, paused or 0) - 10 * MINUTE


def test_each_low_stretch_is_notified_once() -> None:
    at = 55 * MINUTE
    assert next_action(case(), low(HOUR, at), at) == PolicyAction.NOTICE
    assert next_action(case(noticed_ms=0), low(HOUR, at), at) == PolicyAction.NOTHING
    assert next_action(case(noticed_ms=0), low(HOUR, at, since_ms=MINUTE), at) == PolicyAction.NOTICE
