"""Which launch is next: within a queue by rank, between queues in turns, and nothing asked twice at a time."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given, strategies as st

from dstackweb.scheduler.placement.launches import Launch, next_launch
from tests.support import examples

QUEUES, PLACES, OFFERS = st.integers(1, 3), st.sampled_from([(1, "eu"), (1, "us")]), st.sampled_from("ab")


@st.composite
def launches(draw: st.DrawFn) -> list[Launch]:
    return [
        Launch(
            instance=UUID(int=number),
            job=UUID(int=number),
            node=draw(st.integers(0, 1)),
            run=number,
            rank=draw(st.integers(0, 3)),
            seniority_us=draw(st.integers(0, 3)),
            queue=draw(QUEUES),
            place=draw(PLACES),
            offer=draw(OFFERS),
        )
        for number in range(draw(st.integers(0, 8)))
    ]


@examples(500)
@given(
    everything=launches(),
    number=st.integers(0, 3),
    turns=st.dictionaries(QUEUES, st.integers(0, 2)),
    paused=st.sets(PLACES, max_size=1),
    launching=st.sets(st.tuples(PLACES, OFFERS)),
)
def test_it_is_the_one_that_no_other_free_one_precedes(
    everything: list[Launch],
    number: int,
    turns: dict[int, int],
    paused: set[tuple[int, str]],
    launching: set[tuple[tuple[int, str], str]],
) -> None:
    calling, waiting = everything[:number], everything[number:]

    def may_be_ordered(launch: Launch) -> bool:
        if launch.place in paused:
            return False
        for other in calling:
            same = other.place == launch.place and other.offer == launch.offer
            known = (other.place, other.offer) in launching
            is_before = other.queue == launch.queue and (launch.rank, launch.run, launch.node) < (
                other.rank, other.run, other.node,
            )  # fmt: skip
            if same and not known and not is_before:
                return False
        return True

    def precedes(one: Launch, other: Launch) -> bool:
        if one.queue == other.queue:
            return (one.rank, one.run, one.node) < (other.rank, other.run, other.node)
        mine = [launch for launch in free if launch.queue == one.queue]
        theirs = [launch for launch in free if launch.queue == other.queue]
        first = min(mine, key=lambda launch: (launch.rank, launch.run, launch.node))
        their_first = min(theirs, key=lambda launch: (launch.rank, launch.run, launch.node))
        return (turns.get(one.queue, 0), first.seniority_us, first.run) < (
            turns.get(other.queue, 0), their_first.seniority_us, their_first.run,
        )  # fmt: skip

    free = [launch for launch in waiting if may_be_ordered(launch)]
    expected = [one for one in free if not any(precedes(other, one) for other in free if other is not one)]
    assert next_launch(waiting, calling, turns, paused, launching) == (expected[0] if expected else None)
    assert len(expected) == bool(free)
