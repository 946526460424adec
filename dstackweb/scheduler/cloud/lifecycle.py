"""What follows for a cloud's machine, and for the job that it serves, from rows and from what the cloud tells: pure.

Times in a status and of silence are the watcher's; unknown never ends anything.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from dstackweb.backends.contract import Machine, MachineState, Offer
from dstackweb.backends.models import InstanceStatus
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler.placement import offers
from dstackweb.scheduler.placement.offers import Asked, Key
from dstackweb.spec.effective import EffectiveSpec

MOST_TRIES = 25
"""Offers that one attempt of a run is refused before it waits again."""
GIVE_UP_S = 600.0
"""So long a cloud may not be asked for a machine, before its run waits again."""
MISSING_S = 60.0
"""A cloud may leave out for a while what it has just started; and what has called within this is there, whatever the
cloud says: it may be another account that answers since a backend's credentials were changed."""
ORPHANED = dt.timedelta(minutes=10)
STOP_MARGIN_S, STOP_MOST_S = 60.0, 600.0
"""How long after its grace a job may take to end: while its runner is silent, and at all."""
LEAVE_S = 10
"""What is left of an interruption's notice for telling how the job has ended."""
BROKEN = frozenset(
    {
        Reason.INSTANCE_UNREACHABLE.value, Reason.INTERRUPTED.value, Reason.EXECUTOR_ERROR.value,
        Reason.CREATING_CONTAINER_ERROR.value, Reason.NO_CAPACITY.value, Reason.OUT_OF_CAPACITY.value,
    }
)  # fmt: skip
"""A machine whose job ended like this serves no other."""


@dataclass(frozen=True)
class Rules:
    """Settings, seconds: from launch to a machine's first call; to a job's claim on it; of silence."""

    start_s: float
    claim_s: float
    lost_after_s: float


@dataclass(frozen=True)
class Served:
    """The job that a machine serves. `spare_s`: its run's `stop_duration`."""

    status: JobStatus
    claimed: bool = False
    silent_s: float = 0
    status_s: float = 0
    stop_grace_s: int = 0
    spare_s: int = 0

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of it can have been executed."""
        return self.status == JobStatus.PROVISIONING and not self.claimed


@dataclass(frozen=True)
class Row:
    """A machine as its row tells. `ready`: its agent has called."""

    status: InstanceStatus
    cloud_id: str = ""
    ready: bool = False
    status_s: float = 0
    silent_s: float = 0
    idle_until: dt.datetime | None = None
    interrupted_at: dt.datetime | None = None
    wanted: bool = True
    """Its backend is there and takes new runs."""


def overdue(row: Row, job: Served | None, now: dt.datetime, rules: Rules) -> str | None:
    """The code of why a machine is to end that nobody has ended yet; None while it may stay."""
    match row.status:
        case InstanceStatus.REQUESTED:
            return "unreachable" if row.status_s > GIVE_UP_S else None
        case InstanceStatus.STARTING:
            return "not_started" if row.status_s > rules.start_s else None
        case InstanceStatus.RUNNING:
            return _unused(row, now, rules) if job is None else _stuck(row, job, rules)
    return None


def _unused(row: Row, now: dt.datetime, rules: Rules) -> str | None:
    if row.interrupted_at is not None:
        return "interrupted"
    if row.silent_s > rules.lost_after_s:
        return "silent"
    return "idle" if row.idle_until is None or row.idle_until <= now or not row.wanted else None


def _stuck(row: Row, job: Served, rules: Rules) -> str | None:
    if job.is_untouched:
        if row.interrupted_at is not None:
            return "interrupted"
        return "not_started" if min(row.status_s, job.status_s) > rules.claim_s else None
    if job.status == JobStatus.TERMINATING:
        late_s = job.status_s - job.stop_grace_s
        if late_s > STOP_MOST_S or min(late_s, job.silent_s) > STOP_MARGIN_S:
            return "overdue"
    lost_s = rules.lost_after_s + job.spare_s + STOP_MARGIN_S
    return "silent" if min(row.silent_s, job.silent_s) > lost_s else None


class After(Enum):
    """What becomes of the job that a machine served which ends."""

    NOTHING = auto()
    OTHER_OFFER = auto()
    """It may have another machine: nobody was ever told of it."""
    WAIT_AGAIN = auto()
    """Nothing of it was executed, and nothing may be any more: its run waits for another attempt."""
    END = auto()
    """It has ended, once the machine is confirmed gone."""


def after(row: Row, job: Served | None, why: str) -> After:
    """What becomes of the job of a machine that ends, or has ended, for `why`."""
    if job is None or job.status not in JOB_ACTIVE:
        return After.NOTHING
    if not job.is_untouched:
        return After.END
    return After.WAIT_AGAIN if row.ready or why == "unreachable" else After.OTHER_OFFER


def end_reason(why: str) -> Reason:
    """Why a job has ended whose machine went for `why` while it may have been executing."""
    return Reason.INTERRUPTED if why == "interrupted" else Reason.INSTANCE_UNREACHABLE


def kept_s(row: Row, reason: str, idle_duration_s: int | None) -> int:
    """For how many seconds a machine is kept for another run, whose job has just ended for `reason`; 0: not at all."""
    useful = row.status == InstanceStatus.RUNNING and row.interrupted_at is None and row.wanted
    return idle_duration_s or 0 if useful and reason not in BROKEN else 0


def grace_s(stop_duration_s: int, interrupted_at: dt.datetime, now: dt.datetime) -> int:
    """How long a job may take to stop on a machine that the cloud takes back then."""
    return max(0, min(stop_duration_s, int((interrupted_at - now).total_seconds()) - LEAVE_S))


class Told(Enum):
    """What a cloud's answer says of a row."""

    NOTHING = auto()
    THERE = auto()
    ENDING = auto()
    """It ends, though nobody here wanted it to; or it is stopped, and has to be ended."""
    ALIVE = auto()
    """It was to end and doesn't: the cloud has to be told."""
    GONE = auto()


def told(row: Row, machine: Machine | None) -> Told:
    """What a cloud's answer for the row's region says of it; `machine` None: it isn't in the answer."""
    if row.status == InstanceStatus.GONE:
        return Told.NOTHING
    ends = row.status == InstanceStatus.STOPPING
    if machine is None:
        asked_for = bool(row.cloud_id) or ends
        return Told.GONE if asked_for and min(row.status_s, row.silent_s) > MISSING_S else Told.NOTHING
    match machine.state:
        case MachineState.GONE:
            return Told.GONE
        case MachineState.ENDING:
            return Told.NOTHING if ends else Told.ENDING
        case MachineState.STOPPED:
            return Told.ALIVE if ends else Told.ENDING
    return Told.ALIVE if ends else Told.THERE


def orphans(
    machines: Iterable[Machine], known: Mapping[str, tuple[InstanceStatus, str]], now: dt.datetime
) -> list[Machine]:
    """Machines of this deployment that no row wants. `known` has for each instance its status and the cloud's ID.

    A second machine of an instance is one as well. Younger ones may have been started this moment.
    """
    ours = {cloud_id for status, cloud_id in known.values() if status != InstanceStatus.GONE}
    return [
        machine
        for machine in machines
        if machine.state not in (MachineState.ENDING, MachineState.GONE)
        and machine.cloud_id not in ours
        and machine.launched_at is not None
        and now - machine.launched_at > ORPHANED
        and _is_orphan(machine, known.get(machine.instance))
    ]


def _is_orphan(machine: Machine, row: tuple[InstanceStatus, str] | None) -> bool:
    if row is None or row[0] == InstanceStatus.GONE:
        return True
    return bool(row[1]) and row[1] != machine.cloud_id


def match(machines: Sequence[Machine], instance: str, cloud_id: str) -> Machine | None:
    """The machine of a row: the one whose ID it knows, else one with its tag, living ones first."""
    if cloud_id:
        return next((machine for machine in machines if machine.cloud_id == cloud_id), None)
    tagged = [machine for machine in machines if machine.instance == instance]
    order = list(MachineState)
    return min(tagged, key=lambda machine: (order.index(machine.state), machine.cloud_id), default=None)


def next_offer(
    spec: EffectiveSpec, asked: Asked, tried: Collection[Key], place: tuple[str, str] | None
) -> Offer | None:
    """The cheapest offer that was not tried yet and is to be had; `place`: the backend and region it must be in."""
    if len(tried) >= MOST_TRIES:
        return None
    for offer in offers.wanted(spec, asked):
        if offers.key(offer) in tried or not offers.room(offer, {}, 1):
            continue
        if place is None or (offer.backend, offer.region) == place:
            return offer
    return None
