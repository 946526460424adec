"""What is sent when, and what becomes of it when the server is slow, strict or away."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from dstackweb.tracking import sender as module
from dstackweb.tracking.client import TIMEOUT_S, Outcome, SendResult
from dstackweb.tracking.sender import Sender
from tests.support import eventually
from tests.tracking.ear import Ear

OK = SendResult(Outcome.ACCEPTED)


class FakeServer:
    """In place of HTTP: answers in order, then takes all."""

    def __init__(self, *answers: SendResult) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[tuple[float, int]] = []

    def __call__(self, body: bytes, timeout_s: float) -> SendResult:
        self.asked.append((time.monotonic(), len(body)))
        answer = self.answers.pop(0) if self.answers else OK
        if answer.outcome is Outcome.ACCEPTED:
            self.bodies.append(json.loads(body))
        return answer

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [entry for body in self.bodies for entry in body.get(kind, [])]


def sending(post: FakeServer, **options: Any) -> Sender:
    return Sender("http://server/tasks", "secret", post=post, interval_s=0.01, **options)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_BASE_S", 0.01)
    monkeypatch.setattr(module, "BACKOFF_CAP_S", 0.02)
    monkeypatch.setattr(module, "START_CAP_S", 0.02)


def test_of_a_task_only_the_newest_state_is_sent() -> None:
    post = FakeServer()
    sender = sending(post)
    with sender.lock:  # so that nothing is sent between
        sender.event("train-1", "waiting")
        sender.event("train-1", "processing")
        sender.event("train-1", "memory", duration_s=1.5)
    assert sender.flush()
    (event,) = post.entries("events")
    assert {**event, "seq": 0} == {"key": "train-1", "state": "memory", "seq": 0, "duration_s": 1.5}
    assert sender.close()


def test_sequence_numbers_rise_even_if_the_clock_stops_or_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([5_000, 5_000, 3_000, 9_000_000, *[9_000_000] * 20])
    monkeypatch.setattr(module.time, "time_ns", lambda: next(moments))
    post = FakeServer()
    sender = sending(post)
    with sender.lock:
        for number in range(4):
            sender.event(f"a-{number}", "waiting")
    assert sender.flush()
    assert [event["seq"] for event in post.entries("events")] == [5, 6, 7, 9000]
    sender.close()


def test_a_request_has_a_thousand_entries_at_most() -> None:
    post = FakeServer()
    sender = sending(post)
    with sender.lock:
        for number in range(2500):
            sender.event(f"a-{number}", "waiting")
    assert sender.flush()
    assert [len(body["events"]) for body in post.bodies] == [1000, 1000, 500]
    sender.close()


def test_a_request_that_would_be_too_large_is_split() -> None:
    post = FakeServer()
    sender = sending(post)
    with sender.lock:
        for number in range(1000):
            sender.event(f"a-{number}", "erred", message="x" * 2000)
    assert sender.flush()
    assert len(post.entries("events")) == 1000
    assert max(size for _at, size in post.asked) <= module.BODY_MAX
    sender.close()


def test_a_batch_that_the_server_finds_too_large_is_halved_until_it_fits() -> None:
    post = FakeServer(*[SendResult(Outcome.SPLIT)] * 2)
    sender = sending(post)
    with sender.lock:
        for number in range(100):
            sender.event(f"a-{number}", "erred", message="x" * 1000)
    assert sender.flush()
    assert len(post.bodies[0]["events"]) == 25
    assert {event["key"] for event in post.entries("events")} == {f"a-{number}" for number in range(100)}
    sender.close()


def test_a_small_request_refused_as_too_large_is_dropped_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    """As when a run has too many reporters: halving it would only ask a thousand times."""
    post = FakeServer(SendResult(Outcome.SPLIT, detail="413 too many reporters"))
    sender = sending(post)
    with sender.lock:
        for number in range(100):
            sender.event(f"a-{number}", "waiting")
    assert sender.flush()
    assert len(post.asked) == 1
    assert caplog.messages == ["100 reported tasks were rejected (413 too many reporters); this is logged once"]
    sender.close()


def test_a_single_entry_that_is_too_large_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    post = FakeServer(SendResult(Outcome.SPLIT, detail="413 too large"))
    sender = sending(post)
    sender.event("a-1", "waiting")
    assert sender.flush()
    sender.event("a-2", "waiting")
    assert sender.flush()
    assert [event["key"] for event in post.entries("events")] == ["a-2"]
    assert caplog.messages == ["1 reported tasks were rejected (413 too large); this is logged once"]
    sender.close()


def test_retry_after_of_the_server_is_respected(caplog: pytest.LogCaptureFixture) -> None:
    post = FakeServer(SendResult(Outcome.RETRY, 0.3, "429 slowly"))
    sender = sending(post)
    sender.event("a-1", "waiting")
    assert sender.flush()
    (first, _), (second, _) = post.asked
    assert second - first >= 0.3
    assert not caplog.messages  # it is there
    sender.close()


def test_retry_after_is_respected_at_the_end_of_the_program_too() -> None:
    post = FakeServer(SendResult(Outcome.RETRY, 0.3, "429 slowly"))
    sender = sending(post)
    sender.event("a-1", "waiting")
    eventually(lambda: post.asked)
    assert sender.close(5)
    assert post.asked[1][0] - post.asked[0][0] >= 0.3


def test_a_wait_longer_than_the_exit_timeout_is_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    post = FakeServer(*[SendResult(Outcome.RETRY, 60, "429 slowly")] * 9)
    sender = sending(post)
    sender.event("a-1", "waiting")
    eventually(lambda: post.asked)
    began = time.monotonic()
    assert not sender.close(50)
    assert time.monotonic() - began < 40
    assert caplog.messages == ["1 tasks or groups were not reported"]


def test_an_unreachable_server_costs_one_warning_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dstackweb.tracking")
    post = FakeServer(*[SendResult(Outcome.RETRY, None, "refused")] * 8)
    sender = sending(post)
    sender.event("a-1", "processing")
    eventually(lambda: len(post.asked) > 2)
    sender.event("a-1", "memory")
    sender.event("a-2", "memory")
    assert sender.flush()
    assert {event["key"]: event["state"] for event in post.entries("events")} == {"a-1": "memory", "a-2": "memory"}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "cannot report tasks to http://server/tasks, will retry (refused)" in caplog.messages[0]
    sender.close()


def test_the_send_buffer_is_bounded_and_dropped_entries_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    post = FakeServer()
    sender = sending(post, pending_max=3)
    with sender.lock:
        kept = [sender.event(f"a-{number}", "waiting") for number in range(5)]
        assert sender.event("a-0", "memory")  # known keys are taken on
        counted = [sender.count("a", f"a-{number}", {"memory": 1}) for number in range(5)]
    assert kept == counted == [True, True, True, False, False]
    assert not sender.close()
    assert {event["key"]: event["state"] for event in post.entries("events")} == {
        "a-0": "memory", "a-1": "waiting", "a-2": "waiting",
    }  # fmt: skip
    assert caplog.messages == ["2 tasks or groups were not reported"]  # counts are absolute, and reported again


def test_a_run_that_has_not_started_is_waited_for_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dstackweb.tracking")
    post = FakeServer(*[SendResult(Outcome.WAIT, detail="409 not started")] * 8)
    sender = sending(post)
    sender.event("a-1", "processing")
    eventually(lambda: len(post.asked) > 2)
    assert not sender.stopped
    sender.event("a-1", "memory")
    assert sender.flush()
    assert [event["state"] for event in post.entries("events")] == ["processing", "memory"]
    assert caplog.messages == ["tasks are reported later: 409 not started"]
    sender.close()


def test_a_program_that_ends_before_its_run_starts_logs_how_many_reports_were_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    post = FakeServer(*[SendResult(Outcome.WAIT, detail="409 not started")] * 1000)
    sender = sending(post)
    sender.event("a-1", "memory")
    assert not sender.close(0.1)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "1 tasks or groups were not reported: 409 not started"
    ]


def test_a_next_attempt_of_the_run_is_noticed() -> None:
    post = FakeServer(*[replace(OK, attempt=attempt) for attempt in (1, 1, 3)])
    sender = sending(post)
    seen = []
    for number in range(4):
        sender.event(f"a-{number}", "memory")
        assert sender.flush()
        seen.append(sender.attempt_changes)
    assert seen == [0, 0, 1, 1]
    sender.close()


def test_after_the_end_of_the_attempt_nothing_is_sent_or_kept(caplog: pytest.LogCaptureFixture) -> None:
    post = FakeServer(SendResult(Outcome.ENDED, detail="409 the attempt is over"))
    sender = sending(post)
    sender.event("a-1", "waiting")
    assert not sender.flush()
    assert caplog.messages == ["tasks are no longer reported; 1 were not counted: 409 the attempt is over"]
    assert sender.stopped
    assert not sender.event("a-2", "waiting")
    assert not sender.count("a", "a", {"memory": 1})
    assert not sender.failure("a-3", "a", "a", "no")
    assert sender.backlog == 0
    assert not sender.close()
    assert len(post.asked) == 1


def test_a_stopped_sender_does_not_block_callers() -> None:
    post = FakeServer(SendResult(Outcome.ENDED, detail="409 the attempt is over"))
    sender = sending(post)
    sender.event("a-1", "memory")
    assert not sender.flush()
    began = time.monotonic()
    assert not sender.flush(50)
    assert time.monotonic() - began < 40


def test_a_permanent_refusal_of_the_server_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    refusal = SendResult(Outcome.ACCEPTED, detail="a-1: unknown state", rejected=1)
    post = FakeServer(refusal, refusal, SendResult(Outcome.REJECTED, detail="422 no"))
    sender = sending(post)
    for number in range(3):
        sender.event(f"a-{number}", "odd")
        assert sender.flush()
    assert caplog.messages == ["1 reported tasks were rejected (a-1: unknown state); this is logged once"]
    sender.close()


def test_the_end_is_reported_above_all_that_was_reported() -> None:
    post = FakeServer()
    sender = sending(post)
    sender.event("a-1", "processing")
    sender.count("b", "b-1", {"processing": 2}, 3, 1.5)
    sender.failure("b-7", "b", "b-1", "no disk")
    assert sender.close()
    last = post.bodies.pop()
    assert last == {"reporter": sender.reporter, "seq": last["seq"], "ended": True}
    sent = [entry for body in post.bodies for kind in ("events", "counts", "failures") for entry in body.get(kind, [])]
    assert last["seq"] > max(entry.pop("seq") for entry in sent)
    assert sent[1:] == [
        {"prefix": "b", "group": "b-1", "states": {"processing": 2}, "duration_n": 3, "duration_s": 1.5},
        {"key": "b-7", "prefix": "b", "group": "b-1", "message": "no disk"},
    ]
    assert not sender.event("a-1", "memory")


def test_a_reporter_without_reports_reports_no_end() -> None:
    post = FakeServer()
    assert sending(post).close()
    assert not post.asked


def test_a_server_that_never_answers_does_not_delay_the_programs_exit(
    ear: Ear, caplog: pytest.LogCaptureFixture
) -> None:
    ear.hold.clear()
    sender = Sender(ear.url, "secret", interval_s=0.01)
    sender.event("a-1", "waiting")
    eventually(lambda: ear.requests)
    began = time.monotonic()
    assert not sender.flush(0.2)
    assert not sender.close(0.2)
    assert time.monotonic() - began < TIMEOUT_S
    assert caplog.messages == ["1 tasks or groups were not reported: no response in time"]


def test_characters_invalid_in_json_or_databases_are_replaced(ear: Ear) -> None:
    sender = Sender(ear.url, "secret", interval_s=0.01)
    sender.event("file-\udcff\0-1", "erred", message="\0\ud800 é")
    assert sender.flush()
    assert {key: event["message"] for key, event in ear.events().items()} == {"file-??-1": "?? é"}
    assert ear.tokens == {"Bearer secret"}
    sender.close()


def test_a_report_within_a_report_does_not_deadlock() -> None:
    """As a signal's handler does, or the end of something that the garbage collector found."""
    post = FakeServer()
    sender = sending(post)

    class Odd(str):
        __slots__ = ()

        def __hash__(self) -> int:
            sender.event("inner", "memory")
            return super().__hash__()

    sender.event(Odd("outer"), "memory")
    assert sender.flush()
    assert {event["key"] for event in post.entries("events")} == {"inner", "outer"}
    sender.close()


def test_sources_are_polled_before_each_request_until_they_are_exhausted() -> None:
    post = FakeServer()
    sender = sending(post)
    left = [1, None, 2]

    def source() -> bool:
        if left and (count := left.pop(0)):
            sender.count("a", "a", {"memory": count})
        return bool(left)

    sender.add_source(source)
    eventually(lambda: len(post.entries("counts")) == 2)
    assert [count["states"] for count in post.entries("counts")] == [{"memory": 1}, {"memory": 2}]
    eventually(lambda: not sender._sources)
    sender.close()


def test_many_threads_report_at_once() -> None:
    post = FakeServer()
    sender = sending(post)

    def work(name: int) -> None:
        for number in range(500):
            sender.event(f"t{name}-{number}", "processing")
            sender.event(f"t{name}-{number}", "memory")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sender.close()
    events = post.entries("events")
    newest = {event["key"]: event["state"] for event in sorted(events, key=lambda event: event["seq"])}
    assert len(newest) == 4000
    assert set(newest.values()) == {"memory"}
    assert len({event["seq"] for event in events}) == len(events)


def test_a_reporter_without_news_sends_heartbeats() -> None:
    post = FakeServer()
    sender = sending(post, heartbeat_s=0.05)  # type: ignore[arg-type]  # whole seconds otherwise
    time.sleep(0.1)
    assert not post.asked  # it has said nothing yet
    sender.event("a-1", "processing")
    eventually(lambda: len(post.bodies) > 3)
    assert post.bodies[0]["heartbeat_s"] == 0.05
    assert post.bodies[1] == {"reporter": sender.reporter, "heartbeat_s": 0.05}
    assert sender.close()
    assert post.bodies[-1].keys() == {"reporter", "seq", "ended"}
    said = len(post.bodies)
    time.sleep(0.1)
    assert len(post.bodies) == said


def test_a_heartbeat_after_the_end_of_the_run_stops_the_sender(caplog: pytest.LogCaptureFixture) -> None:
    post = FakeServer(OK, SendResult(Outcome.RETRY, detail="refused"), SendResult(Outcome.ENDED, detail="409 over"))
    sender = sending(post, heartbeat_s=0.02)  # type: ignore[arg-type]  # whole seconds otherwise
    sender.event("a-1", "processing")
    eventually(lambda: sender.stopped)
    assert caplog.messages == ["tasks are no longer reported; 0 were not counted: 409 over"]
