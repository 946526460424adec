"""What task groups are reported to be: the sum of all that was ever under a name, whatever moved meanwhile."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, strategies as st

from dstackweb.progress import counters
from dstackweb.tracking.dask import OTHERS, PREFIXES_MAX, STATES, GroupCounter


class Prefix:
    def __init__(self, name: str) -> None:
        self.name = name


class Group:
    """As distributed's: one object per life of a group, empty ones are falsy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = Prefix(name.split("-")[0])
        self.states = dict.fromkeys(STATES, 0)
        self.all_durations: dict[str, float] = {}

    def __len__(self) -> int:
        return 0


class Scheduler:
    """Creates, moves and forgets tasks as distributed does, reports to a counter, and knows what the sums must be."""

    def __init__(self, counter: GroupCounter) -> None:
        self.counter = counter
        self.groups: dict[str, Group] = {}
        self.tasks: dict[str, tuple[Group, str]] = {}
        self.gone: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.released: dict[str, tuple[str, str]] = {}
        self.how: dict[str, str] = {}

    def put(self, key: str, state: str, seconds: float = 1.0, *, marked: bool = True) -> None:
        """Move a task, which is made where there is none."""
        name = key[:-1]
        group = self.groups.setdefault(name, Group(name)) if key not in self.tasks else self.tasks[key][0]
        before = self.tasks.get(key, (group, "released"))[1]
        if key in self.tasks:
            group.states[before] -= 1
        group.states[state] += 1
        self.counter.note_end(key, group, before, state)  # type: ignore[arg-type]
        self._note_end(key, name, before, state)
        timed = int(before == "processing" and state == "memory")
        if timed:
            group.all_durations["compute"] = group.all_durations.get("compute", 0.0) + seconds
        self.tasks[key] = (group, state)
        if marked:
            self.counter.dirty[group] = self.counter.dirty.get(group, 0) + timed
        if state == "forgotten":
            del self.tasks[key]
            if not any(n for state, n in group.states.items() if state != "forgotten"):
                del self.groups[name]
                self.gone[name]["forgotten"] += group.states["forgotten"]

    def _note_end(self, key: str, name: str, before: str, state: str) -> None:
        """How a task had ended that is released or forgotten now."""
        if before != "released":
            self.how[key] = {"memory": "_done", "erred": "_failed"}.get(before, "")
        how = self.how.pop(key, "") if state == "forgotten" else self.how.get(key, "")
        self.released.pop(key, None)
        if how and state == "released":
            self.released[key] = (name, how)
        elif how and state == "forgotten":
            self.dropped[name][f"forgotten{how}"] += 1

    def sums(self) -> dict[str, Counter[str]]:
        """By group's name: what all of its tasks, of all its lives, are, and how those ended that are gone."""
        sums = {name: Counter(counts) for name, counts in self.gone.items()}
        for name, group in self.groups.items():
            sums.setdefault(name, Counter()).update({STATES[state]: n for state, n in group.states.items()})
        apart = {name: Counter(counts) for name, counts in self.dropped.items()}
        for name, how in self.released.values():
            apart.setdefault(name, Counter())[f"released{how}"] += 1
        for name, counts in apart.items():
            for state, n in counts.items():
                sums[name][state] += n
                sums[name][state.split("_")[0]] -= n
        return {name: +counts for name, counts in sums.items()}


Page = dict[tuple[str, str], tuple[dict[str, int], int, float]]


def show(page: Page, counter: GroupCounter, limit: int | None = None) -> None:
    for prefix, group, states, timed, seconds in counter.collect(limit):
        page[prefix, group] = (states, timed, seconds)


MOVES = st.lists(
    st.tuples(st.sampled_from([f"{name}{i}" for name in ("a-1-", "a-2-", "b-1-") for i in range(3)]),
              st.sampled_from(sorted(STATES)), st.integers(0, 4)),
    max_size=60,
)  # fmt: skip


@given(MOVES)
def test_the_last_report_of_a_group_is_the_sum_over_all_its_lives(moves: list[tuple[str, str, int]]) -> None:
    counter, page = GroupCounter(), Page()
    scheduler = Scheduler(counter)
    for key, state, ticked in moves:
        if state == "forgotten" and key not in scheduler.tasks:
            continue
        scheduler.put(key, state)
        if ticked < 2:
            show(page, counter, limit=ticked + 1)
    show(page, counter)
    assert {group: Counter(states) for (_, group), (states, _, _) in page.items()} == scheduler.sums()
    assert not counter.dirty


@given(MOVES, st.integers(1, 3))
def test_beyond_the_limit_groups_count_together_and_totals_stay(
    moves: list[tuple[str, str, int]], groups_max: int
) -> None:
    counter, page = GroupCounter(groups_max=groups_max, prefixes_max=1), Page()
    scheduler = Scheduler(counter)
    for key, state, _ in moves:
        if state != "forgotten" or key in scheduler.tasks:
            scheduler.put(key, state)
            show(page, counter)
    shown: Counter[str] = Counter()
    for states, _, _ in page.values():
        shown.update(states)
    assert shown == sum(scheduler.sums().values(), Counter())
    assert len({prefix for prefix, _ in page} - {OTHERS}) <= 1
    assert len([group for _, group in page if group != OTHERS]) <= groups_max


def test_the_plug_in_counts_as_many_prefixes_one_by_one_as_the_server() -> None:
    assert (PREFIXES_MAX, OTHERS) == (counters.PREFIXES_MAX, counters.OTHERS)


def test_times_add_up_over_the_lives_of_a_group_from_the_start_of_watching() -> None:
    counter, page = GroupCounter(), Page()
    scheduler = Scheduler(counter)
    scheduler.put("a-1-0", "processing", marked=False)
    scheduler.put("a-1-0", "memory", 100.0, marked=False)
    counter.attach(scheduler.groups.values())
    show(page, counter)
    assert page["a", "a-1-"] == ({"memory": 1}, 0, 0.0)
    for life in range(2):
        scheduler.put("a-1-0", "processing")
        scheduler.put("a-1-0", "memory", 2.0)
        scheduler.put("a-1-0", "forgotten")
        show(page, counter)
        assert page["a", "a-1-"] == ({"forgotten_done": life + 1}, life + 1, 2.0 * (life + 1))


def test_two_lives_between_two_ticks_are_both_counted() -> None:
    counter, page = GroupCounter(), Page()
    scheduler = Scheduler(counter)
    for state in ("memory", "forgotten", "waiting"):
        scheduler.put("a-1-0", state)
    show(page, counter)
    assert page["a", "a-1-"][0] == {"forgotten_done": 1, "waiting": 1}


def test_tasks_without_a_transition_event_are_found_by_a_scan() -> None:
    counter, page = GroupCounter(), Page()
    scheduler = Scheduler(counter)
    scheduler.put("scattered-0", "memory", marked=False)
    counter.mark_changed(scheduler.groups.values())
    show(page, counter)
    assert page["scattered", "scattered-"][0] == {"memory": 1}
    counter.mark_changed(scheduler.groups.values())
    assert not counter.dirty
    scheduler.put("scattered-1", "memory", marked=False)
    counter.mark_changed(scheduler.groups.values())
    show(page, counter)
    assert page["scattered", "scattered-"][0] == {"memory": 2}


def test_a_group_that_ended_during_a_scan_is_not_counted_again() -> None:
    counter, page = GroupCounter(), Page()
    scheduler = Scheduler(counter)
    scheduler.put("a-1-0", "memory")
    seen = list(scheduler.groups.values())
    scheduler.put("a-1-0", "forgotten")
    show(page, counter)
    counter.mark_changed(seen)
    show(page, counter)
    assert page["a", "a-1-"][0] == {"forgotten_done": 1}


def test_an_unknown_state_counts_as_waiting() -> None:
    counter, page = GroupCounter(), Page()
    group = Group("a-1-")
    group.states |= {"thinking": 2, "waiting": 1}
    counter.dirty[group] = 0
    show(page, counter)
    assert page["a", "a-1-"][0] == {"waiting": 3}


def test_an_ended_group_is_released_from_memory() -> None:
    counter = GroupCounter()
    scheduler = Scheduler(counter)
    for i in range(50):
        scheduler.put(f"a-{i}-0", "memory")
        scheduler.put(f"a-{i}-0", "forgotten")
        counter.collect()
    assert not counter._contributions


def test_for_a_next_attempt_all_counts_are_collected_again_some_at_a_time() -> None:
    counter, page = GroupCounter(), Page()
    scheduler = Scheduler(counter)
    for name in ("a-1-0", "a-2-0", "b-1-0"):
        scheduler.put(name, "memory")
    scheduler.put("a-1-0", "forgotten")
    show(page, counter)
    counter.repeat_all()
    again = Page()
    show(again, counter, limit=2)
    assert len(again) == 2
    show(again, counter, limit=2)
    assert again == page
    assert counter.collect() == []


def test_a_recomputed_and_released_result_does_not_count_as_done() -> None:
    counter, page = GroupCounter(), Page()
    scheduler = Scheduler(counter)
    seen = []
    for state in ("memory", "released", "waiting", "released", "forgotten"):
        scheduler.put("a-1-0", state)
        show(page, counter)
        seen.append(page["a", "a-1-"][0])
    assert seen == [{"memory": 1}, {"released_done": 1}, {"waiting": 1}, {"released": 1}, {"forgotten": 1}]
    assert not counter._how
    assert not counter._ended
