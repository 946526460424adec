from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest
from django.utils import timezone
from django_q.models import OrmQ

from dstackweb.scheduler.models import PeriodicJob
from dstackweb.scheduler.processes import tasks

pytestmark = pytest.mark.django_db


def job(work: Callable[[], object]) -> tasks.Periodic:
    return tasks.Periodic("a", work, 2.0, "control")


JOBS = [job(lambda: None)]


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    calls: list[tuple] = []
    monkeypatch.setattr(tasks, "enqueue", lambda *args, **kwargs: calls.append(args))
    tasks.ensure_rows(JOBS)
    return calls


def test_due_work_is_enqueued_once(enqueued: list[tuple]) -> None:
    now = timezone.now()
    assert tasks.enqueue_due(JOBS, now) == 1
    assert tasks.enqueue_due(JOBS, now) == 0
    assert len(enqueued) == 1


def test_nothing_is_enqueued_while_a_younger_tick_is_outstanding(enqueued: list[tuple]) -> None:
    now = timezone.now()
    tasks.enqueue_due(JOBS, now)
    assert tasks.enqueue_due(JOBS, now + dt.timedelta(seconds=5)) == 0
    tasks.run_tick(JOBS[0], now.timestamp())
    assert tasks.enqueue_due(JOBS, now + dt.timedelta(seconds=5)) == 1


def test_a_tick_lost_with_its_worker_is_replaced(enqueued: list[tuple]) -> None:
    now = timezone.now()
    tasks.enqueue_due(JOBS, now)
    assert tasks.enqueue_due(JOBS, now + dt.timedelta(seconds=11)) == 1


def test_a_clock_put_back_by_a_day_stops_nothing(enqueued: list[tuple]) -> None:
    now = timezone.now()
    tasks.enqueue_due(JOBS, now + dt.timedelta(days=1))
    assert tasks.enqueue_due(JOBS, now) == 1


def test_a_tick_that_waited_too_long_does_nothing(enqueued: list[tuple]) -> None:
    done: list[int] = []
    tasks.run_tick(job(lambda: done.append(1)), timezone.now().timestamp() - 120)
    assert done == []


def test_the_error_of_periodic_work_is_kept_for_the_health_page(enqueued: list[tuple]) -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        tasks.run_tick(job(fail), timezone.now().timestamp())
    row = PeriodicJob.objects.get()
    assert (row.last_error, row.outstanding_until) == ("ValueError: broken", None)
    assert OrmQ.objects.count() == 0


def test_a_tick_refused_by_the_broker_is_retried_at_its_next_time(
    enqueued: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionError("no broker")

    now = timezone.now()
    with monkeypatch.context() as patched:
        patched.setattr(tasks, "enqueue", away)
        with pytest.raises(ConnectionError):
            tasks.enqueue_due(JOBS, now)
    assert tasks.enqueue_due(JOBS, now + dt.timedelta(seconds=2)) == 1


def test_periodic_work_of_another_version_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    tasks.tick("of-another-version", timezone.now().timestamp())
    assert "of-another-version is periodic work of another version" in caplog.text
