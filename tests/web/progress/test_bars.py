"""Bars and their words: what is drawn adds up, what matters is seen, and numbers read as people say them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from dstackweb.progress.estimate import Rate
from dstackweb.progress.selectors import ProgressBar
from dstackweb.progress.states import FINISHED, LIVE, PLAIN, TaskState
from dstackweb.progress.time_left import Left
from dstackweb.web.progress.bars import COLOURS, MIN_WIDTH, ProgressRow, colour, segments
from dstackweb.wording import progress as progress_words
from dstackweb.wording.progress import meaning, state

S = TaskState
COUNTS = st.dictionaries(st.sampled_from(PLAIN), st.integers(0, 10**9))


def bar(name: str = "train", rate: Rate | None = None, left: Left | None = None, **counts: int) -> ProgressBar:
    """A row of counters; states by name."""
    every = {one: counts.get(one.value, 0) for one in TaskState}
    finished, live = sum(every[one] for one in FINISHED), sum(every[one] for one in LIVE)
    made = ProgressBar(1, name, every, finished + live, finished, live, 1, None, None, None, 1, 0)
    made.__dict__.update(rate=rate, left=left)  # as if worked out from how fast they finished
    return made


@given(COUNTS)
def test_segments_lie_side_by_side_within_the_bar(counts: dict[TaskState, int]) -> None:
    drawn, x = segments(counts), 0.0
    for part in drawn:
        assert float(part.x) == pytest.approx(x, abs=0.02)
        assert float(part.width) >= 0
        x = float(part.x) + float(part.width)
    assert x <= 100.02
    if drawn and not counts.get(S.WAITING):
        assert x == pytest.approx(100, abs=0.02)


@given(COUNTS)
def test_each_state_with_tasks_is_drawn_once_and_no_other(counts: dict[TaskState, int]) -> None:
    there = {one.value for one, n in counts.items() if n and one is not S.WAITING}
    assert {part.state for part in segments(counts)} == there


@given(st.integers(1, 10**9), st.integers(1, 50))
def test_a_few_failed_tasks_among_many_are_visible(done: int, failed: int) -> None:
    found = {part.state: float(part.width) for part in segments({S.MEMORY: done, S.ERRED: failed, S.NO_WORKER: 1})}
    assert found["erred"] >= MIN_WIDTH - 0.01
    assert found["no_worker"] >= MIN_WIDTH - 0.01


def test_a_name_keeps_its_colour() -> None:
    assert [colour(name) for name in ("train-baseline", "evaluate", "tokenize-shard")] == [7, 0, 1]
    assert all(0 <= colour(f"name-{n}") < COLOURS for n in range(50))


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(212.4, "212/s"), (9.96, "10/s"), (6.1, "6.1/s"), (1, "1/s"), (0.2, "12/min"), (0.05, "3/min"), (0.001, "3.6/h"),
     (2e-5, "1.7/day"), (48_211, "48,211/s")],
)  # fmt: skip
def test_a_rate_has_the_unit_that_reads_best(per_s: float, text: str) -> None:
    assert progress_words.rate(per_s) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(660, 1140, "11–19 min"), (73, 114, "73–114 s"), (40, 190, "40 s – 3 min"), (7300, 14000, "2–4 h"),
     (300, math.inf, "over 5 min"), (600, 600, "10 min")],
)  # fmt: skip
def test_a_range_has_one_unit(low: float, high: float, text: str) -> None:
    assert progress_words.between(low, high) == text


@given(st.floats(0.001, 10**8), st.floats(1, 1000))
def test_any_range_is_worded(low: float, factor: float) -> None:
    text = progress_words.between(low, low * factor)
    assert text
    assert "inf" not in text


def test_a_narrow_estimate_is_shown_as_one_number() -> None:
    assert progress_words.left(Left(38, 35, 42)) == "38 s"
    assert progress_words.spread(Left(38, 35, 42)) == ""
    assert progress_words.left(Left(720, 660, 1140)) == "11–19 min"


def test_next_to_a_wide_range_the_single_number_is_rounded() -> None:
    assert ProgressRow(bar(left=Left(5090, 1800, 15000), memory=3, queued=5)).estimate == "≈ 85 min"
    assert ProgressRow(bar(left=Left(5090, 4800, 5300), memory=3, queued=5)).estimate == "≈ 1 h 24 min"


def test_with_tasks_without_a_worker_only_the_lower_bound_is_shown() -> None:
    line = ProgressRow(bar(left=Left(300, 290, math.inf), memory=3, queued=5, no_worker=1))
    assert (line.left, line.estimate, line.left_range) == ("over 5 min", "over 5 min", "")


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, "–"),
        ({"memory": 3}, "done"),
        ({"forgotten": 3}, "finished"),
        ({"forgotten_done": 2, "released_done": 1}, "done"),
        ({"forgotten_done": 2, "forgotten_failed": 1}, "finished"),
        ({"memory": 3, "erred": 1}, "finished"),
        ({"memory": 3, "released": 1}, "finished"),
        ({"released": 3}, "finished"),
        ({"memory": 3, "no_worker": 1}, "no worker"),
        ({"waiting": 1, "no_worker": 1}, "waiting"),
        ({"queued": 5, "waiting": 9}, "queued"),
        ({"processing": 1}, "–"),
    ],
)
def test_a_row_without_a_rate_shows_its_state(counts: dict[str, int], text: str) -> None:
    assert ProgressRow(bar(**counts)).left == text


def test_a_rate_is_reported_only_while_something_is_left() -> None:
    fast = Rate(2, 1.5, 2.5)
    assert ProgressRow(bar(rate=fast, memory=10, queued=5)).rate == "2/s"
    assert ProgressRow(bar(rate=fast, memory=10)).rate == ""


def test_a_bar_has_a_sentence_for_screen_readers() -> None:
    shown = ProgressRow(bar("train", memory=41_210, erred=12, processing=640, queued=8138)).sentence
    assert shown == "train: 41,222 of 50,000 finished; 41,210 done, 12 failed, 640 running, 8,138 queued"


def test_forgotten_tasks_are_drawn_and_described_by_their_outcome() -> None:
    line = ProgressRow(bar("score", memory=1, forgotten_done=56, forgotten_failed=3))
    assert [(part.state, part.width) for part in line.segments] == [("memory", "95"), ("erred", "5")]
    assert [words for _state, words in line.parts] == ["3\N{NO-BREAK SPACE}failed"]
    shown = "score: 60 of 60 finished; 1 done, 56 done, then forgotten, 3 failed, then forgotten"
    assert line.sentence == shown


def test_a_bar_shows_100_percent_only_when_all_tasks_are_finished() -> None:
    assert ProgressRow(bar(memory=99_999, queued=1)).percent == "99 %"
    assert ProgressRow(bar(memory=100_000)).percent == "100 %"


@pytest.mark.parametrize("code", list(TaskState))
def test_every_state_has_a_word_and_a_meaning(code: TaskState) -> None:
    assert "_" not in state(code)
    assert meaning(code).endswith(".")


def test_an_unknown_state_is_shown_as_it_is() -> None:
    assert state("dreaming") == "dreaming"
