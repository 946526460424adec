"""What the counters of a scope should be by all that was ever reported, and random histories to report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from dstackweb.progress.models import Scope, TaskGroup, TaskPrefix
from dstackweb.progress.reports import Batch, Count, Event
from dstackweb.progress.states import DROPPED, GONE, LIVE, PLAIN, SHOWN, TaskState

S = TaskState
KEYS = [f"{prefix}-{group}-{task}" for prefix in "ab" for group in (1, 2) for task in (1, 2)]
GROUPS = sorted({key.rpartition("-")[0] for key in KEYS})
REPORTERS = ("r", "s")

Counters = dict[str, Counter[TaskState]]
"""By scope (""), prefix and group."""

seqs = st.integers(0, 12)
"""Few, so that they are often the same."""
events = st.builds(
    lambda key, state, seq: Event(key, state, seq, key[0], key.rpartition("-")[0]),
    st.sampled_from(KEYS),
    st.sampled_from(PLAIN),
    seqs,
)
counts = st.builds(
    lambda group, seq, states: (group, seq, states),
    st.sampled_from(GROUPS),
    seqs,
    st.dictionaries(st.sampled_from(TaskState), st.integers(0, 3), max_size=3),
)
Reported = tuple[str, list[Event], list[tuple[str, int, dict[TaskState, int]]], int | None]
"""What one batch is made of: the reporter, events, counts, and the sequence of its end."""
batches: st.SearchStrategy[Reported] = st.tuples(
    st.sampled_from(REPORTERS), st.lists(events, max_size=6), st.lists(counts, max_size=3), st.none() | seqs
)


def of_history(history: Sequence[Reported]) -> list[Batch]:
    """Batches as reporters make them: with one sequence a reporter says one thing of a task, and of a group."""
    said: dict[tuple[str, str, int], object] = {}
    made = []
    for reporter, reported, counted, ended in history:
        mine = [said.setdefault((reporter, event.key, event.seq), event) for event in reported]
        sums = [
            said.setdefault((reporter, f"counts {group}", seq), Count(group[0], group, seq, states))
            for group, seq, states in counted
        ]
        made.append(Batch(reporter, tuple(mine), tuple(sums), (), ended))
    return made


def modelled(batches: Iterable[Batch]) -> Counters:
    """What should be counted, by everything that was ever reported."""
    events, counts, ended = [], [], dict[str, int]()
    for batch in batches:
        events += [(event.seq, batch.reporter, event) for event in batch.events]
        counts += [(count.seq, batch.reporter, count) for count in batch.counts]
        if batch.ended_seq is not None:
            ended[batch.reporter] = max(ended.get(batch.reporter, 0), batch.ended_seq)

    def now(state: TaskState, seq: int, reporter: str) -> TaskState:
        return S.RELEASED if state in LIVE and seq <= ended.get(reporter, -1) else state

    found: Counters = {}

    def add(prefix: str, group: str, state: TaskState, number: int) -> None:
        for name in ("", prefix, group) if state not in GONE else ("", prefix):
            found.setdefault(name, Counter())[state] += number

    for key in {event.key for _seq, _reporter, event in events}:
        mine = [reported for reported in events if reported[2].key == key]
        seq, reporter, event = max(
            mine, key=lambda reported: (reported[2].state == S.FORGOTTEN, reported[0], reported[1])
        )
        add(event.prefix, event.group, _dropped(event, mine) or now(event.state, seq, reporter), 1)
    for reporter, group in {(reporter, count.group) for _seq, reporter, count in counts}:
        mine_too = [reported for reported in counts if reported[1] == reporter and reported[2].group == group]
        seq, _reporter, count = max(mine_too, key=lambda reported: reported[0])
        for state, number in count.states.items():
            add(count.prefix, group, now(state, seq, reporter), number)
    return {name: +states for name, states in found.items() if +states}


def _dropped(event: Event, reported: Sequence[tuple[int, str, Event]]) -> TaskState | None:
    """Of a released or forgotten task: that, by how it had ended by the newest of its other events."""
    if event.state not in DROPPED:
        return None
    others = [one for one in reported if one[2].state not in DROPPED]
    ended = max(others, key=lambda one: one[:2])[2].state if others else None
    word = {S.MEMORY: "_done", S.ERRED: "_failed"}.get(ended, "") if ended else ""
    return TaskState(event.state + word)


def kept(scope_id: int) -> Counters:
    """What is counted. Of groups without what they forgot, which they report from their last making on only."""

    def of(row: Scope | TaskPrefix | TaskGroup, states: Iterable[TaskState]) -> Counter[TaskState]:
        return Counter({state: number for state in states if (number := getattr(row, state))})

    found = {"": of(Scope.objects.get(pk=scope_id), TaskState)}
    found |= {prefix.name: of(prefix, TaskState) for prefix in TaskPrefix.objects.filter(scope=scope_id)}
    found |= {group.name: of(group, SHOWN) for group in TaskGroup.objects.filter(prefix__scope=scope_id)}
    return {name: states for name, states in found.items() if states}
