from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from dstackweb.lib.models import PROBE_S, Circuit, Open

NOW = timezone.now()
S = dt.timedelta(seconds=1)

pytestmark = pytest.mark.django_db


def throttle(now: dt.datetime, rnd: float = 0.999) -> dt.datetime:
    return Circuit.throttled("quotas", now, lambda: rnd)


def test_a_circuit_that_was_never_throttled_is_closed_and_has_no_row() -> None:
    assert Circuit.enter("quotas", NOW) is False
    assert not Circuit.objects.exists()


def test_a_throttle_opens_it_for_a_while_and_then_one_tries() -> None:
    until = throttle(NOW)
    assert NOW + 1.9 * S < until <= NOW + 2 * S
    with pytest.raises(Open) as opened:
        Circuit.enter("quotas", NOW + S)
    assert opened.value.until == until
    assert Circuit.enter("quotas", until) is True
    with pytest.raises(Open):
        Circuit.enter("quotas", until)
    Circuit.succeeded("quotas")
    assert Circuit.enter("quotas", until) is False


def test_each_further_throttle_opens_it_for_twice_as_long_up_to_five_minutes() -> None:
    now, waits = NOW, []
    for _ in range(10):
        until = throttle(now, 0.999999)
        waits.append(round((until - now).total_seconds()))
        now = until
        assert Circuit.enter("quotas", now) is True
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    Circuit.succeeded("quotas")
    assert (throttle(now, 0.999999) - now).total_seconds() == pytest.approx(2, abs=0.01)


def test_concurrent_throttles_count_as_one() -> None:
    until = throttle(NOW)
    assert [throttle(NOW + n * S / 10) for n in range(1, 5)] == [until] * 4
    assert Circuit.objects.get().failures == 1


def test_even_the_smallest_jitter_waits_a_little() -> None:
    assert throttle(NOW, 0.0) == NOW + S / 2


def test_a_probe_that_was_killed_or_failed_otherwise_is_followed_by_another() -> None:
    until = throttle(NOW)
    assert Circuit.enter("quotas", until)
    assert Circuit.enter("quotas", until + PROBE_S * S)
    Circuit.failed("quotas")
    assert Circuit.enter("quotas", until + PROBE_S * S)


def test_a_clock_that_was_set_back_closes_the_circuit() -> None:
    throttle(NOW + dt.timedelta(hours=2))
    assert Circuit.enter("quotas", NOW) is True
