"""What every kind of backend offers to the rest (DESIGN 6). Backends never see a run: a LaunchSpec goes down."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

from dstackweb.spec.launch import LaunchSpec
from dstackweb.spec.requirements import Requirements


class Availability(enum.StrEnum):
    """How likely an offer is to be had now. Unknown is not zero: such an offer stays usable."""

    AVAILABLE = "available"
    IDLE = "idle"
    BUSY = "busy"
    NO_QUOTA = "no_quota"
    NOT_AVAILABLE = "not_available"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Offer:
    """One way to get the resources asked for. `price` is USD per hour; `detail` is a code with its numbers."""

    backend: str
    instance_type: str
    cpus: int
    memory_mib: int
    availability: Availability
    region: str = ""
    gpu_name: str = ""
    gpu_count: int = 0
    gpu_memory_mib: int = 0
    spot: bool = False
    price: Decimal = Decimal(0)
    detail: dict[str, Any] = field(default_factory=dict)
    host_id: int | None = None


@dataclass(frozen=True)
class Handle:
    """What a backend needs to find a started job again: `ref` is its own name for the place, such as a host."""

    job: str
    ref: str


class Presence(enum.StrEnum):
    """What is left of a started job."""

    ALIVE = "alive"
    """Its runner lives."""
    ORPHANED = "orphaned"
    """Its runner is dead, and processes of the job still live: nothing it holds may be given away."""
    GONE = "gone"
    """Confirmed: neither its runner nor a process of it lives."""


class Backend(Protocol):
    """The code behind one kind of backend. Each call may be repeated, doubled or lost on the way."""

    def offers(self, requirements: Requirements, *, image: str | None = None) -> Sequence[Offer]:
        """Every way to get the requirements (per node), best first, those that can't be had now included.

        Reads cached sources only: a placement pass waits for the answer, so it never waits for a network. Unknown is
        not zero, and nothing known at all is an exception, not an empty list, which says that there never is a way.
        `detail["fits"]`, where it is there, is how many nodes the offer takes now.
        """
        ...

    def start(self, launch: LaunchSpec, offer: Offer) -> Handle:
        """Start the job's runner; a second call for the same job starts nothing. Raises StartFailed."""
        ...

    def observe(self, handle: Handle) -> Presence:
        """What is left of the job."""
        ...

    def stop(self, handle: Handle, grace_s: int | None) -> bool:
        """Have the job end within the grace, or at once with None. True when all of it is confirmed gone."""
        ...


class StartFailed(Exception):
    """The backend could not start a job's runner; the text says why."""
