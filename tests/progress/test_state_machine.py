"""Runs that move and report, late, twice and killed midway: all counters equal a model and a recount."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from dstackweb.lib.errors import Conflict
from dstackweb.progress import finalize, ingest
from dstackweb.progress.models import Scope
from dstackweb.progress.reports import Batch
from dstackweb.progress.states import LIVE, TaskState
from dstackweb.runs.launch import scope_for
from dstackweb.runs.models import Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import PLACED, RUN_MOVES, RunStatus
from dstackweb.runs.transitions import move_run
from tests.factories import join, make_project, make_run, make_user
from tests.progress.model import Counters, Reported, batches, kept, modelled, of_history

pytestmark = pytest.mark.django_db

NOW = 1_800_000_000_000
some = st.integers(0, 99)
"""Which of those there are."""


class Killed(BaseException):
    """What no product code catches."""


@dataclass
class Attempt:
    """What was reported inside one attempt: by whom it was meant to be, and what has arrived."""

    scope_id: int
    history: list[Reported] = field(default_factory=list)
    arrived: list[Batch] = field(default_factory=list)
    over: bool = False

    @property
    def batches(self) -> list[Batch]:
        return of_history(self.history)


class Machine(RuleBasedStateMachine):
    """A project's runs and the tasks inside them, in one transaction that is rolled back."""

    def __init__(self) -> None:
        super().__init__()
        self.block = transaction.atomic()
        self.block.__enter__()
        self.project = make_project()
        self.ada = join(self.project, make_user())
        self.runs: list[int] = []
        self.attempts: dict[tuple[int, int], Attempt] = {}

    def teardown(self) -> None:
        transaction.set_rollback(True)
        self.block.__exit__(None, None, None)

    @rule(prefix=st.sampled_from(("train", "eval")))
    def submit(self, prefix: str) -> None:
        self.runs.append(make_run(self.project, self.ada, f"{prefix}-{len(self.runs)}").pk)

    @precondition(lambda self: self.runs)
    @rule(one=some, to=st.sampled_from(RunStatus))
    def move(self, one: int, to: RunStatus) -> None:
        run = self._run(one)
        if to not in RUN_MOVES[RunStatus(run.status)]:
            return
        again = {"attempt": run.attempt + 1} if to == RunStatus.PENDING else {}
        reported = self.attempts.get((run.pk, run.attempt))
        if reported is not None and run.status in PLACED and to not in PLACED:
            reported.over = True
        assert move_run(run, to, now=timezone.now(), **again)

    @precondition(lambda self: self.runs)
    @rule(one=some, reported=batches)
    def report(self, one: int, reported: Reported) -> None:
        """Something new; where no attempt goes on, nobody takes it."""
        run = self._run(one)
        try:
            scope_id = scope_for(run)
        except Conflict:
            assert run.status not in PLACED
            return
        attempt = self.attempts.setdefault((run.pk, run.attempt), Attempt(scope_id))
        attempt.history.append(reported)
        self._ingest(attempt, attempt.batches[-1])

    @precondition(lambda self: self.attempts)
    @rule(one=some, reported=batches)
    def be_late(self, one: int, reported: Reported) -> None:
        """What is reported now and arrives later, if ever (`report_again`)."""
        self._attempt(one).history.append(reported)

    @precondition(lambda self: self.attempts)
    @rule(one=some, which=some)
    def report_again(self, one: int, which: int) -> None:
        attempt = self._attempt(one)
        self._ingest(attempt, attempt.batches[which % len(attempt.history)])

    @precondition(lambda self: self.attempts)
    @rule(one=some, which=some, after=st.integers(0, 25))
    def be_killed_while_telling(self, one: int, which: int, after: int) -> None:
        attempt = self._attempt(one)
        batch = attempt.batches[which % len(attempt.history)]
        before = Scope.objects.values().get(pk=attempt.scope_id)
        if _killed(after, lambda: self._ingest(attempt, batch)):
            assert Scope.objects.values().get(pk=attempt.scope_id) == before

    @precondition(lambda self: any(attempt.over for attempt in self.attempts.values()))
    @rule(after=st.integers(0, 25))
    def settle_or_be_killed(self, after: int) -> None:
        for scope_id in finalize.due():
            if not _killed(after, lambda scope_id=scope_id: finalize.settle(scope_id)):  # type: ignore[misc]
                assert finalize.settle(scope_id)
                assert not any(getattr(Scope.objects.get(pk=scope_id), state) for state in LIVE)

    @invariant()
    def all_counters_are_right(self) -> None:
        assert list(differences()) == []
        for attempt in self.attempts.values():
            fold = _folded if attempt.over else lambda counters: counters
            assert fold(kept(attempt.scope_id)) == fold(modelled(attempt.arrived))

    def _run(self, one: int) -> Run:
        return Run.objects.get(pk=self.runs[one % len(self.runs)])

    def _attempt(self, one: int) -> Attempt:
        return list(self.attempts.values())[one % len(self.attempts)]

    def _ingest(self, attempt: Attempt, batch: Batch) -> None:
        try:
            ingest.ingest_batch(attempt.scope_id, batch, NOW)
        except Conflict:
            assert attempt.over
        else:
            assert not attempt.over
            attempt.arrived.append(batch)


def _folded(counters: Counters) -> Counters:
    """As if all that was live had been released."""
    return {
        name: +Counter({state: number for state, number in states.items() if state not in LIVE})
        + Counter({TaskState.RELEASED: sum(states[state] for state in LIVE)})
        for name, states in counters.items()
    }


def _killed(after: int, act: Callable[[], object]) -> bool:
    """Whether it was killed, before its statement after so many."""
    left = after

    def until(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        nonlocal left
        if "SAVEPOINT" not in sql:
            left -= 1
            if left < 0:
                raise Killed
        return execute(sql, *rest)

    try:
        with connection.execute_wrapper(until):
            act()
    except Killed:
        return True
    return False


def _explore(examples: int, steps: int) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    some_time = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=quiet)
    run_state_machine_as_test(Machine, settings=some_time)  # type: ignore[no-untyped-call]


def test_counters_are_right_after_every_step() -> None:
    _explore(6, 20)


@pytest.mark.nightly
def test_counters_are_right_after_every_step_of_many_more() -> None:
    _explore(20, 30)
