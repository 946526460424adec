"""Durations of tasks inside runs: histograms that are kept with the sums, and quantiles of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project
from dstackweb.progress import selectors
from dstackweb.progress.counters import ensure_scope
from dstackweb.progress.estimate import BINS, added
from dstackweb.progress.models import Scope, TaskPrefix
from dstackweb.progress.recount import differences
from dstackweb.progress.selectors import TIMED_MIN
from dstackweb.progress.states import TaskState
from tests.progress.test_ingest import count, event, ingest_entries

S = TaskState
RATIO = 2 ** (1 / BINS.per_octave)
seconds = st.floats(0.002, 1_000_000)


@given(st.lists(seconds, min_size=TIMED_MIN, max_size=200), st.sampled_from([0.5, 0.95]))
def test_a_quantile_is_within_a_bin_of_the_exact_one(took: list[float], share: float) -> None:
    histogram = "{}"
    for one in took:
        histogram = added(histogram, {BINS.bin_of(one): 1})
    counts = {int(number): many for number, many in json.loads(histogram).items()}
    exact = sorted(took)[math.ceil(share * len(took)) - 1]
    found = BINS.quantile(counts, share)
    assert found is not None
    assert exact / RATIO <= found * 1.0001
    assert found <= exact * RATIO * 1.0001


pytestmark = pytest.mark.django_db


@pytest.fixture
def scope_id(project: Project) -> int:
    return ensure_scope(project.pk, 7, 1)


def took(scope_id: int, *each: float, prefix: str = "a", first: int = 0) -> None:
    for number, one in enumerate(each, start=first):
        ingest_entries(scope_id, event(f"{prefix}-{number}", S.MEMORY, 1, duration_s=one))


def quantiles(prefix: str = "a") -> list[float] | None:
    row = TaskPrefix.objects.get(name=prefix)
    return selectors.duration_quantiles([row.pk], (0.5, 0.95)).get(row.pk)


def test_each_timed_task_counts_once_in_its_prefix(scope_id: int) -> None:
    took(scope_id, 1, 1, 1, 1)
    assert quantiles() is None
    took(scope_id, 100, first=4)
    took(scope_id, 100, first=4)  # the same batch again
    found = quantiles()
    assert found is not None
    assert 0.7 < found[0] <= 1
    assert 80 < found[1] <= 130
    took(scope_id, 50, prefix="b")
    assert sum(TaskPrefix.objects.get(name="a").durations.values()) == 5
    assert Scope.objects.get(pk=scope_id).duration_n == 6
    assert list(differences()) == []


def test_a_prefix_of_which_sums_were_reported_has_no_quantiles(scope_id: int) -> None:
    took(scope_id, 1, 2, 3, 4, 5)
    assert quantiles() is not None
    ingest_entries(scope_id, count("a", 9, memory=10, duration_n=10, duration_s=30.0), reporter="sums")
    assert quantiles() is None


def test_reading_is_one_statement_for_all_prefixes(scope_id: int, django_assert_num_queries: Any) -> None:
    for prefix in "abc":
        took(scope_id, 1, 2, 3, 4, 5, prefix=prefix)
    ids = list(TaskPrefix.objects.values_list("pk", flat=True))
    with django_assert_num_queries(1):
        assert len(selectors.duration_quantiles(ids, (0.5,))) == 3


def test_a_histogram_with_more_tasks_than_were_timed_is_found(scope_id: int) -> None:
    took(scope_id, 1)
    TaskPrefix.objects.update(durations={"3": 2})
    assert [one.what.split(" of ")[0] for one in differences()] == ["durations"]
