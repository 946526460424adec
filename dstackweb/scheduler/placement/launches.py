"""Which instance is launched next, of all that placed runs wait for: pure (docs/design.md#scheduling).

Within a queue by rank, between queues in turns. It is decided anew before each call of a cloud, so a run that arrives
waits for none that were there before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

Place = tuple[int, str]
"""A backend's id, and a region of it."""


@dataclass(frozen=True)
class Launch:
    """An instance that a run's node waits for. `offer` is what its order asks for, whichever run it is for."""

    instance: UUID
    job: UUID
    node: int
    run: int
    rank: int
    seniority_us: int
    queue: int
    place: Place
    offer: Any

    @property
    def order(self) -> tuple[int, int, int]:
        """Its place among those of its queue."""
        return self.rank, self.run, self.node


def next_launch(
    waiting: Sequence[Launch],
    calling: Sequence[Launch],
    turns: Mapping[int, int],
    paused: Collection[Place],
    launching: Collection[tuple[Place, Any]],
) -> Launch | None:
    """The launch to order next; None if none may be ordered now.

    `calling` are those being ordered by others. `turns` has for each queue its launches in flight, and the calls that
    were refused lately. Places that can't be called now are `paused`.

    What another call asks for is not asked for a second time before its answer, since it would be the same: unless the
    cloud is known to have room for it (`launching`), or the launch comes before the one that is being ordered.
    """
    asked = [other for other in calling if (other.place, other.offer) not in launching]

    def is_free(launch: Launch) -> bool:
        return launch.place not in paused and not any(
            (other.place, other.offer) == (launch.place, launch.offer)
            and not (other.queue == launch.queue and launch.order < other.order)
            for other in asked
        )

    heads: dict[int, Launch] = {}
    for launch in waiting:
        head = heads.get(launch.queue)
        if (head is None or launch.order < head.order) and is_free(launch):
            heads[launch.queue] = launch
    # Ranks of different queues are never compared.
    return min(heads.values(), key=lambda head: (turns.get(head.queue, 0), head.seniority_us, head.run), default=None)
