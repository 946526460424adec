"""Whatever comes, in whatever order and however often: the counters equal a naive model and a recount."""

from __future__ import annotations

import random

import pytest
from django.db import transaction
from hypothesis import HealthCheck, given, settings, strategies as st

from dstackweb.accounts.models import Project
from dstackweb.progress import ingest
from dstackweb.progress.counters import ensure_scope
from dstackweb.progress.recount import differences
from dstackweb.progress.reports import Event
from dstackweb.progress.states import TaskState
from tests.progress.model import Reported, batches, kept, modelled, of_history

NOW = 1_800_000_000_000

pytestmark = pytest.mark.django_db


@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(batches, max_size=8), seed=st.randoms(use_true_random=False))
def test_the_same_batches_in_any_order_and_number_give_the_same_counters(
    project: Project,
    history: list[Reported],
    seed: random.Random,
) -> None:
    reported = of_history(history)
    wanted = modelled(reported)
    for run_id, order in enumerate((reported, seed.sample([*reported, *reported], 2 * len(reported))), 1):
        with transaction.atomic():
            scope_id = ensure_scope(project.pk, run_id, 1)
            for batch in order:
                ingest.ingest_batch(scope_id, batch, NOW)
            assert kept(scope_id) == wanted
            assert list(differences()) == []
            transaction.set_rollback(True)


def test_a_prefix_whose_tasks_only_change_groups_counts_its_groups(project: Project) -> None:
    """The sums of the prefix stay as they are: one group loses what another gets."""
    event = Event("a-1-1", TaskState.MEMORY, 0, "a", "a-1")
    one = {TaskState.RELEASED_DONE: 1}
    history: list[Reported] = [
        ("r", [event], [], None), ("s", [], [("a-1", 0, one)], None), ("s", [], [("a-1", 1, {}), ("a-2", 0, one)], None)
    ]  # fmt: skip
    scope_id = ensure_scope(project.pk, 1, 1)
    for batch in of_history(history):
        ingest.ingest_batch(scope_id, batch, NOW)
    assert list(differences()) == []
