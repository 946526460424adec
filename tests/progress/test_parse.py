"""What a request reports of tasks, from JSON: defaults, places, and that one bad entry costs itself alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from dstackweb.lib.errors import Invalid, TooLarge
from dstackweb.progress import reports
from dstackweb.progress.models import KEY_MAX, NAME_MAX
from dstackweb.progress.reports import (
    COUNT_MAX,
    ENTRIES_MAX,
    MESSAGE_MAX,
    SEQ_MAX,
    Batch,
    Count,
    Event,
    Failure,
    ParsedRequest,
    parse_request,
)
from dstackweb.progress.states import ALIASES, CODES, TaskState

S = TaskState
NOW = 1_700_000_000_000_000


def parsed(**body: Any) -> ParsedRequest:
    return parse_request(body, "job-0", NOW)


def event(**given: Any) -> Event:
    (one,) = parsed(events=[{"key": "train-1", "state": "done", **given}]).batch.events
    return one


def reason(where: str = "events", **entry: Any) -> str:
    batch = parsed(**{where: [entry, {"key": "ok", "state": "done"}] if where == "events" else [entry]})
    assert len(batch.batch.events) == (where == "events")
    (rejected,) = batch.rejected
    assert (rejected.list, rejected.index) == (where, 0)
    return rejected.reason


def test_missing_fields_have_defaults() -> None:
    assert parsed().batch == Batch("job-0")
    assert event() == Event("train-1", S.MEMORY, NOW, "train", "train")
    (count,) = parsed(counts=[{"prefix": "p", "states": {}}]).batch.counts
    assert count == Count("p", "p", NOW, {})
    (failure,) = parsed(failures=[{"key": "train-1"}]).batch.failures
    assert failure == Failure("train-1", "train", "train", NOW, "")


def test_the_requests_seq_is_that_of_entries_without_one() -> None:
    batch = parsed(seq=5, events=[{"key": "a", "state": "done"}, {"key": "b", "state": "done", "seq": 9}]).batch
    assert [one.seq for one in batch.events] == [5, 9]


@pytest.mark.parametrize(
    ("names", "place"),
    [
        ({}, ("train", "train")), ({"prefix": "p"}, ("p", "p")), ({"group": "g"}, ("train", "g")),
        ({"prefix": "p", "group": "g"}, ("p", "g")), ({"prefix": "", "group": None}, ("train", "train")),
    ],
)  # fmt: skip
def test_prefix_and_group_default_to_parts_of_the_key(names: dict[str, Any], place: tuple[str, str]) -> None:
    assert (event(**names).prefix, event(**names).group) == place


def test_a_task_stays_where_a_request_reported_of_it_first() -> None:
    first = {"key": "train-0.1-1", "state": "waiting", "group": "train-0.1"}
    later = {"key": "train-0.1-1", "state": "running"}
    named_late = {"key": "test-1", "state": "done", "prefix": "p"}
    batch = parsed(events=[first, {"key": "test-1", "state": "running"}, later, named_late]).batch
    assert [(one.prefix, one.group) for one in batch.events] == [
        ("train", "train-0.1"), ("test", "test"), ("train", "train-0.1"), ("test", "test"),
    ]  # fmt: skip


def test_a_bad_name_is_refused_wherever_the_task_is() -> None:
    first = {"key": "a", "state": "running"}
    (rejected,) = parsed(events=[first, {"key": "a", "state": "done", "group": 7}]).rejected
    assert (rejected.index, rejected.reason) == (1, "bad_name")


@pytest.mark.parametrize("word", list(ALIASES))
def test_states_may_have_dask_names_or_plain_ones(word: str) -> None:
    assert event(state=word).state in CODES


def test_two_words_for_one_state_add_up() -> None:
    (count,) = parsed(counts=[{"prefix": "p", "states": {"done": 2, "memory": 3, "no-worker": 1}}]).batch.counts
    assert count.states == {S.MEMORY: 5, S.NO_WORKER: 1}


@pytest.mark.parametrize(
    ("body", "ended_seq"),
    [
        ({}, NOW), ({"seq": 7}, 7), ({"events": [{"key": "a", "state": "done", "seq": 3}]}, 3),
        ({"seq": 2, "events": [{"key": "a", "state": "done", "seq": 3}]}, 3),
        ({"seq": 9, "counts": [{"prefix": "a", "states": {}, "seq": 3}]}, 9),
    ],
)  # fmt: skip
def test_a_reporter_has_ended_with_the_last_that_it_reported(body: dict[str, Any], ended_seq: int) -> None:
    assert parsed(ended=True, **body).batch.ended_seq == ended_seq
    assert parsed(ended=False, **body).batch.ended_seq is None


def test_a_message_is_cut_and_made_storable() -> None:
    assert event(message="a\0b\ud800" + "x" * MESSAGE_MAX).message == "a?b?" + "x" * (MESSAGE_MAX - 4)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"state": "done"}, "bad_key"), ({"key": 3, "state": "done"}, "bad_key"),
        ({"key": "k" * (KEY_MAX + 1), "state": "done"}, "bad_key"), ({"key": "\0", "state": "done"}, "bad_key"),
        ({"key": "\ud800", "state": "done"}, "bad_key"), ({"key": "é\0", "state": "done"}, "bad_key"),
        ({"key": "a"}, "unknown_state"), ({"key": "a", "state": []}, "unknown_state"),
        ({"key": "a", "state": "DONE"}, "unknown_state"),
        ({"key": "a", "state": "done", "seq": -1}, "bad_seq"), ({"key": "a", "state": "done", "seq": 1.5}, "bad_seq"),
        ({"key": "a", "state": "done", "seq": SEQ_MAX + 1}, "bad_seq"),
        ({"key": "a", "state": "done", "seq": True}, "bad_seq"),
        ({"key": "a", "state": "done", "prefix": "p" * (NAME_MAX + 1)}, "bad_name"),
        ({"key": "a", "state": "done", "group": 1}, "bad_name"),
        ({"key": "a", "state": "done", "duration_s": -1}, "malformed"),
        ({"key": "a", "state": "done", "duration_s": float("nan")}, "malformed"),
        ({"key": "a", "state": "done", "duration_s": float("inf")}, "malformed"),
        ({"key": "a", "state": "done", "duration_s": "1"}, "malformed"),
        ({"key": "a", "state": "done", "message": 1}, "malformed"),
        ({"key": "a", "state": "done", "x": 1}, "malformed"),
    ],
)  # fmt: skip
def test_a_bad_event_is_refused_by_itself(entry: dict[str, Any], why: str) -> None:
    assert reason(**entry) == why


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"states": {}}, "malformed"), ({"prefix": "", "states": {}}, "malformed"), ({"prefix": "p"}, "malformed"),
        ({"prefix": "p", "states": {"odd": 1}}, "unknown_state"),
        ({"prefix": "p", "states": {"done": -1}}, "malformed"),
        ({"prefix": "p", "states": {"done": COUNT_MAX + 1}}, "malformed"),
        ({"prefix": "p", "states": {"done": True}}, "malformed"), ({"prefix": "p", "states": [1]}, "malformed"),
        ({"prefix": "p", "states": {}, "duration_n": -1}, "malformed"),
        ({"prefix": "p", "states": {}, "duration_s": -1}, "malformed"),
        ({"prefix": "p", "states": {}, "key": "k"}, "malformed"),
    ],
)  # fmt: skip
def test_a_bad_count_is_refused_by_itself(entry: dict[str, Any], why: str) -> None:
    assert reason("counts", **entry) == why


def test_accepted_entries_keep_their_position_in_the_request() -> None:
    known = {"key": "a", "state": "done"}
    read_back = parsed(
        events=[known, 1, known], counts=[None, {"prefix": "p", "states": {}}], failures=[[], {"key": "a"}]
    )
    assert dict(read_back.positions) == {"events": [0, 2], "counts": [1], "failures": [1]}
    assert [(one.list, one.index) for one in read_back.rejected] == [("events", 1), ("counts", 0), ("failures", 0)]
    assert read_back.entries == 7


def test_a_request_has_a_limit_over_all_its_lists() -> None:
    many = [{"key": "a", "state": "done"}] * (ENTRIES_MAX - 1)
    assert parsed(events=many, failures=[{"key": "a"}]).entries == ENTRIES_MAX
    with pytest.raises(TooLarge):
        parsed(events=many, failures=[{"key": "a"}], counts=[{}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["key", "state", "seq", "prefix", "group", "duration_s", "duration_n", "message", "states"]
ENTRY = st.dictionaries(st.sampled_from(FIELDS), JSON | st.sampled_from(["done", "a-1"]), max_size=5) | JSON
BODY = st.fixed_dictionaries(
    {},
    optional={
        "events": st.lists(ENTRY, max_size=4), "counts": st.lists(ENTRY, max_size=4), "seq": JSON, "ended": JSON,
        "failures": st.lists(ENTRY, max_size=4), "reporter": JSON, "attempt": JSON, "odd": JSON,
    },
)  # fmt: skip


@given(BODY | JSON)
def test_every_entry_of_any_request_is_either_read_or_refused(body: Any) -> None:
    try:
        found = parse_request(body, "job-0", NOW)
    except Invalid:
        return
    asked = sum(len(body.get(name) or ()) for name in ("events", "counts", "failures"))
    assert found.entries == asked
    reported = (*found.batch.events, *found.batch.counts, *found.batch.failures)
    assert all(0 <= one.seq <= SEQ_MAX for one in reported)
    json.dumps([one.detail + one.key for one in found.rejected]).encode()


WIDE = {f"x{number}": 1 for number in range(1000)}


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"events": [{**WIDE, "key": "a", "state": "done"}]}, "x0: Extra inputs are not permitted"),
        ({"failures": [{**WIDE, "key": "a"}]}, "x0: Extra inputs are not permitted"),
        ({"counts": [{**WIDE, "prefix": "a", "states": {}}]}, "x0: Extra inputs are not permitted"),
        ({"counts": [{"prefix": "a", "states": {"done": 1, **WIDE}}]}, "states: Input should be "),
    ],
)
def test_unknown_fields_of_an_entry_are_not_validated_one_by_one(
    body: dict[str, Any], detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = count_errors(monkeypatch)
    (rejected,) = parsed(**body).rejected
    assert rejected.detail.startswith(detail)
    assert errors == [1]


def test_unknown_fields_of_a_request_are_not_validated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = count_errors(monkeypatch)
    with pytest.raises(Invalid) as refused:
        parsed(**WIDE)
    assert (refused.value.errors[0]["loc"], errors) == (["x0"], [1])


def count_errors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of errors that pydantic reports from now on."""
    counts: list[int] = []

    class Adapter:
        def __init__(self, adapter: Any) -> None:
            self.adapter = adapter

        def validate_python(self, given: object) -> Any:
            try:
                return self.adapter.validate_python(given)
            except ValidationError as error:
                counts.append(error.error_count())
                raise

    for name in ("BODY", "EVENTS", "COUNTS", "FAILURES"):
        monkeypatch.setattr(reports, name, Adapter(getattr(reports, name)))
    return counts
