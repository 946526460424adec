"""Codes become sentences in one place, and none is left without words."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone, translation

from dstackweb.runs.models import RunEvent
from dstackweb.runs.states import JobStatus, Reason, RunStatus
from dstackweb.web.templatetags import dstackweb_tags
from dstackweb.wording import events as event_words, statuses, units, waiting
from dstackweb.wording.sentence import capitalized, fill, joined


@pytest.mark.parametrize("reason", list(Reason))
def test_every_termination_reason_is_a_sentence(reason: Reason) -> None:
    assert statuses.termination(reason) != reason
    assert statuses.termination(reason).endswith(".")


@pytest.mark.parametrize("kind", [*RunStatus, "retry", "requeued", "stop_requested", "start_deadline"])
def test_every_event_of_a_run_is_worded(kind: str) -> None:
    data = {"queue": "default", "priority": 50, "reason": "stopped_by_user", "nodes": [{"host": "box-1", "gpus": 2}]}
    words = event_words.event_text(RunEvent(kind=kind, data=data), nodes=1)
    assert words
    assert "_" not in words


@pytest.mark.parametrize("status", list(JobStatus)[1:])
def test_events_of_jobs_name_their_node_where_there_are_several(status: JobStatus) -> None:
    event = RunEvent(kind=f"job_{status}", node=3, data={"termination_reason": "executor_error"})
    assert event_words.event_text(event, nodes=4).startswith("node 3: ")
    assert "node" not in event_words.event_text(event, nodes=1)


UNREAD = {"code": "source_failed", "kind": "aws", "error": {"code": "failed", "text": "x"}}


@pytest.mark.parametrize(
    ("detail", "text", "whole", "beyond"),
    [
        ({}, "the disk is full", "the disk is full", "the disk is full"),
        ({"code": "exited", "exit_code": 3}, "", "Exit code 3.", ""),
        ({"code": "exited", "exit_code": 134}, "", "Exit code 134: killed by SIGABRT.", ""),
        ({"code": "out_of_capacity"}, "None in eu.", "No cloud had an instance for it. None in eu.", "None in eu."),
        (
            {
                "code": "late",
                "deadline_s": 90,
                "cause": UNREAD,
            },
            "",
            "it did not start within 90 s: Its offers cannot be read: x",
            "it did not start within 90 s: Its offers cannot be read: x",
        ),
        ({"code": "full_moon"}, "tide", "tide", "tide"),
    ],
)
def test_messages_are_worded_when_they_are_read(detail: dict[str, Any], text: str, whole: str, beyond: str) -> None:
    assert (statuses.message(detail, text), statuses.beyond_reason(detail, text)) == (whole, beyond)


def test_an_instance_start_is_worded_with_its_price() -> None:
    data = {"backend": "aws", "region": "eu", "instance_type": "m5.large", "spot": True, "cloud_id": "i-1"}
    event = RunEvent(kind="machine_started", data=data | {"price": "0.0350"})
    assert event_words.event_text(event, nodes=1) == "starting instance i-1: aws eu m5.large (spot) at $0.035 per hour"
    event = RunEvent(kind="machine_started", data={**data, "backend": "dask", "spot": False, "price": "0.0000"})
    assert event_words.event_text(event, nodes=1) == "starting instance i-1: dask eu m5.large"


def test_the_end_of_a_run_has_the_punctuation_of_the_readers_language() -> None:
    event = RunEvent(kind="failed", data={"reason": Reason.JOB_FAILED})
    assert event_words.event_text(event, nodes=1) == "failed: A job failed."
    with translation.override("zh-hans"):
        assert event_words.event_text(event, nodes=1) == "失败：有作业失败。"


def test_an_event_of_a_newer_server_is_still_shown() -> None:
    assert event_words.event_text(RunEvent(kind="moved_to_the_moon", data={}), nodes=1) == "moved to the moon"


@pytest.mark.parametrize(
    ("code", "data", "words"),
    [
        (
            "waiting_for_capacity",
            {"gpus": 4, "short": ["gpus"], "gpus_free": 1, "gpus_total": 8, "host": "box-1"},
            "needs 4 GPUs, 1 of 8 free on box-1",
        ),
        (
            "waiting_for_capacity",
            {"cpus": 1, "short": ["cpus"], "cpus_free": 0, "cpus_total": 2, "host": "b", "nodes": 3, "nodes_placed": 2},
            "room for 2 of 3 nodes; needs 1 CPU, 0 of 2 free on b",
        ),
        (
            "impossible",
            {"code": "too_large", "memory_mib": 2048, "short": ["memory_mib"], "memory_mib_total": 1024},
            "no host has enough: 2 GB of memory required, at most 1 GB of memory on one host",
        ),
        (
            "impossible",
            {"code": "image_not_supported", "image": "x:1"},
            "it needs the image x:1, and no host has Docker or Podman",
        ),
        ("backend_unavailable", {"code": "no_hosts"}, "no host has joined yet"),
        (
            "backend_unavailable",
            {"code": "hosts_offline", "hosts": ["a", "b"]},
            "the matching hosts are offline, draining or held back: a, b",
        ),
    ],
)
def test_reasons_to_wait_carry_their_numbers(code: str, data: dict[str, object], words: str) -> None:
    assert waiting.reason(code, data).text == words


def test_amounts_have_the_unit_that_fits() -> None:
    assert [units.mebibytes(mib) for mib in (512, 1024, 1536, 81920, 2 << 20)] == [
        "512 MB", "1 GB", "1.5 GB", "80 GB", "2 TB",
    ]  # fmt: skip


NOW = dt.datetime(2031, 5, 4, 9, 30, tzinfo=dt.UTC)


@pytest.fixture
def _noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timezone, "now", lambda: NOW)


@pytest.mark.usefixtures("_noon")
def test_a_sentence_keeps_its_times_as_parts_through_all_operations() -> None:
    today, later = NOW.replace(hour=18, minute=40), NOW.replace(day=6)
    busy = fill("busy until %(at)s", at=today)
    text = "it is " + joined("; ", [busy, fill("reserved until %(at)s for %(run)s", at=later, run="x %s")]) + "."
    assert text == "it is busy until 18:40 UTC; reserved until 2031-05-06 09:30 UTC for x %s."
    assert [part for part in text.parts if isinstance(part, dt.datetime)] == [today, later]
    assert busy.capitalized().parts == ("Busy until ", today)


def test_text_that_looks_like_a_time_stays_text() -> None:
    assert str(dstackweb_tags.moments(fill("%(text)s", text="at 10:00 UTC\0at\0"))) == "at 10:00 UTCat"
    assert str(dstackweb_tags.moments("at 10:00 UTC")) == "at 10:00 UTC"


def test_a_moment_on_a_page_is_shown_by_the_readers_clock_and_names_stay_escaped() -> None:
    at = dt.datetime(2031, 5, 6, 9, 30, tzinfo=dt.UTC)
    page = str(dstackweb_tags.moments(fill("reserved for %(run)s until %(at)s at most", run="<b>", at=at)))
    assert page == (
        "reserved for &lt;b&gt; until <time datetime=2031-05-06T09:30:00Z data-when=hour>2031-05-06 09:30 UTC"
        "</time> at most"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no run is called x", "No run is called x"),
        ("gpu-box-1: needs 2 GPUs", "gpu-box-1: needs 2 GPUs"),
        ("it’s paused", "It’s paused"),
        ("failed: A job failed.", "Failed: A job failed."),
        ("", ""),
    ],
)
def test_sentences_begin_with_a_capital_and_names_stay_as_they_are(text: str, shown: str) -> None:
    assert capitalized(text) == shown
    with translation.override("zh-hans"):
        assert capitalized(text) == text
