"""What follows for a cloud instance and its job, from rows and from the cloud's answer. Decides only, does no I/O.
Times in a status and of silence are counted by the watcher. What is unknown never ends anything."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto

from django.conf import settings

from dstackweb.backends.contract import CloudInstance, InstanceEnd, InstanceState, Offer
from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE, JobStatus, Reason
from dstackweb.scheduler.placement import offers
from dstackweb.scheduler.placement.offers import BackendOffers, OfferKey
from dstackweb.spec.effective import EffectiveSpec

GIVE_UP_S = 600.0
"""A run waits again when its cloud has been unreachable this long."""
MISSING_S = 60.0
"""An instance counts as gone only when missing from the cloud's answer and silent for this long. Clouds list new
instances late, and after a change of credentials another account may answer."""
ORPHANED = dt.timedelta(minutes=10)
STOP_MARGIN_S, STOP_MAX_S = 60.0, 600.0
"""How long a job may take to end beyond its grace: while its runner is silent, and at most."""
REPORT_S = 10
"""The part of an interruption's notice that is left for reporting how the job ended."""
LACKS_ROOM_S = 60.0
"""Longest time in seconds that an engine may keep an instance waiting for room: some look only once a minute."""
CONFIRM_S = 10.0
"""A cloud may show an instance as running for a moment after its end has begun. So long after a job was ended by a
signal, an instance that is running has not ended with it."""
NOT_REUSABLE = frozenset(
    {
        Reason.INSTANCE_UNREACHABLE.value, Reason.INTERRUPTED.value, Reason.EXECUTOR_ERROR.value,
        Reason.CREATING_CONTAINER_ERROR.value, Reason.NO_CAPACITY.value, Reason.OUT_OF_CAPACITY.value,
    }
)  # fmt: skip
"""An instance whose job ended for one of these takes no other job."""


def reason_to_end(row: Instance, job: Job | None, now: dt.datetime) -> InstanceEnd | None:
    """Why an instance that is not ending yet must end, as a code; None while it may stay."""
    active = job if job is not None and job.status in JOB_ACTIVE else None
    match row.status:
        case InstanceStatus.REQUESTED:
            # Without an error it waits for its turn.
            fails = bool(row.error or row.error_detail)
            return InstanceEnd.UNREACHABLE if fails and row.status_s > GIVE_UP_S else None
        case InstanceStatus.STARTING:
            return InstanceEnd.NOT_STARTED if row.status_s > settings.DSTACKWEB_CLOUD_START_DEADLINE_S else None
        case InstanceStatus.RUNNING:
            return _unused(row, now) if active is None else _stuck(row, active)
    return None


def _unused(row: Instance, now: dt.datetime) -> InstanceEnd | None:
    if row.interrupted_at is not None:
        return InstanceEnd.INTERRUPTED
    if row.silent_s > settings.DSTACKWEB_LOST_AFTER_S:
        return InstanceEnd.SILENT
    return InstanceEnd.IDLE if row.idle_until is None or row.idle_until <= now or not _is_wanted(row) else None


def _stuck(row: Instance, job: Job) -> InstanceEnd | None:
    if job.reported_at is not None:
        return None
    if _is_untouched(job):
        if row.interrupted_at is not None:
            return InstanceEnd.INTERRUPTED
        late = min(row.status_s, job.status_s) > settings.DSTACKWEB_START_DEADLINE_S
        return InstanceEnd.NOT_STARTED if late else None
    if job.status == JobStatus.TERMINATING:
        late_s = job.status_s - (job.stop_grace_s or 0)
        if late_s > STOP_MAX_S or min(late_s, job.silent_s) > STOP_MARGIN_S:
            return InstanceEnd.OVERDUE
    lost_s = settings.DSTACKWEB_LOST_AFTER_S + (job.run.spec.get("stop_duration_s") or 0) + STOP_MARGIN_S
    return InstanceEnd.SILENT if min(row.silent_s, job.silent_s) > lost_s else None


def _is_untouched(job: Job) -> bool:
    """Whether none of its commands can have been executed."""
    return job.status == JobStatus.PROVISIONING and not job.claim_nonce


def _is_wanted(row: Instance) -> bool:
    """Whether its backend exists and is enabled."""
    return row.backend.enabled and row.backend.deleted_at is None


class JobFollowUp(Enum):
    """What happens to the job of an instance that ends."""

    NOTHING = auto()
    OTHER_OFFER = auto()
    """The job gets another offer: no agent has received it."""
    TAKE_BACK = auto()
    """The run waits at its place in the queue, as before it was placed: the cluster has no room now."""
    WAIT_AGAIN = auto()
    """No part of the job was executed, and none may be from now on: the run waits for another attempt."""
    END = auto()
    """The job ends once the instance is confirmed gone."""


def follow_up(row: Instance, job: Job | None, why: str) -> JobFollowUp:
    """What happens to the job of an instance that ends, or has ended, for `why`."""
    if job is None or job.status not in JOB_ACTIVE:
        return JobFollowUp.NOTHING
    if not _is_untouched(job):
        return JobFollowUp.END
    may_have_started = row.ready_at is not None or why == InstanceEnd.UNREACHABLE
    if may_have_started:
        return JobFollowUp.WAIT_AGAIN
    return JobFollowUp.TAKE_BACK if why == InstanceEnd.NO_ROOM else JobFollowUp.OTHER_OFFER


def job_end_reason(why: str) -> Reason:
    """The reason of a job that may have been executing when its instance ended for `why`."""
    return Reason.INTERRUPTED if why == InstanceEnd.INTERRUPTED else Reason.INSTANCE_UNREACHABLE


class Cause(Enum):
    """Why commands ended that were ended by a signal."""

    UNKNOWN = auto()
    """The cloud has not said yet."""
    OWN = auto()
    MACHINE = auto()


def cause_of_end(job: Job, machine: CloudInstance | None) -> Cause:
    """Why a job ended whose runner has reported a signal, by the cloud's answer to a question asked after that."""
    if machine is None:
        return Cause.UNKNOWN
    if machine.state not in (InstanceState.STARTING, InstanceState.RUNNING):
        return Cause.MACHINE
    return Cause.OWN if job.status_s >= CONFIRM_S else Cause.UNKNOWN


def idle_time_s(row: Instance, reason: str, idle_duration_s: int | None) -> int:
    """How many seconds to keep an instance for another run, once its job has ended for `reason`; 0: end it."""
    useful = row.status == InstanceStatus.RUNNING and row.interrupted_at is None and _is_wanted(row)
    return idle_duration_s or 0 if useful and reason not in NOT_REUSABLE else 0


def grace_s(stop_duration_s: int, interrupted_at: dt.datetime, now: dt.datetime) -> int:
    """Seconds that a job may take to stop before the cloud takes its instance back at `interrupted_at`."""
    return max(0, min(stop_duration_s, int((interrupted_at - now).total_seconds()) - REPORT_S))


class CloudState(Enum):
    """What a cloud's answer says about a row."""

    NOTHING = auto()
    THERE = auto()
    ENDING = auto()
    """It is ending or stopped although its row says otherwise; a stopped one must be terminated."""
    ALIVE = auto()
    """It should be ending and is not: the cloud must be asked to terminate it."""
    GONE = auto()


def cloud_state(row: Instance, machine: CloudInstance | None) -> CloudState:
    """Compare a row with its cloud's answer for the region; `machine` is None where the answer has none."""
    if row.status == InstanceStatus.GONE:
        return CloudState.NOTHING
    ends = row.status == InstanceStatus.STOPPING
    if machine is None:
        asked_for = bool(row.cloud_id) or ends
        return CloudState.GONE if asked_for and min(row.status_s, row.silent_s) > MISSING_S else CloudState.NOTHING
    match machine.state:
        case InstanceState.GONE:
            return CloudState.GONE
        case InstanceState.ENDING:
            return CloudState.NOTHING if ends else CloudState.ENDING
        case InstanceState.STOPPED:
            return CloudState.ALIVE if ends else CloudState.ENDING
    return CloudState.ALIVE if ends else CloudState.THERE


def lacks_room(row: Instance, machine: CloudInstance) -> bool:
    """Whether its engine keeps it waiting because others got the room, so that its run waits better in its queue.

    There it can be moved, and a run that goes before it starts before it.
    """
    return machine.lacks_room and row.status == InstanceStatus.STARTING and row.status_s > LACKS_ROOM_S


def find_orphans(
    machines: Iterable[CloudInstance], known: Mapping[str, tuple[InstanceStatus, str]], now: dt.datetime
) -> list[CloudInstance]:
    """Instances of this deployment at the cloud that no row wants, such as a second one for a row. `known`: status and
    cloud ID by row id. Younger ones than ORPHANED are left alone: their row may not be written yet."""
    ours = {cloud_id for status, cloud_id in known.values() if status != InstanceStatus.GONE}
    return [
        machine
        for machine in machines
        if machine.state not in (InstanceState.ENDING, InstanceState.GONE)
        and machine.cloud_id not in ours
        and machine.launched_at is not None
        and now - machine.launched_at > ORPHANED
        and _is_orphan(machine, known.get(machine.instance))
    ]


def _is_orphan(machine: CloudInstance, row: tuple[InstanceStatus, str] | None) -> bool:
    if row is None or row[0] == InstanceStatus.GONE:
        return True
    return bool(row[1]) and row[1] != machine.cloud_id


def find_instance(machines: Sequence[CloudInstance], instance: str, cloud_id: str) -> CloudInstance | None:
    """The cloud's instance for a row: by cloud ID, else by tag, running ones first."""
    if cloud_id:
        return next((machine for machine in machines if machine.cloud_id == cloud_id), None)
    tagged = [machine for machine in machines if machine.instance == instance]
    order = list(InstanceState)
    return min(tagged, key=lambda machine: (order.index(machine.state), machine.cloud_id), default=None)


def next_offer(
    spec: EffectiveSpec, asked: BackendOffers, tried: Collection[OfferKey], place: tuple[str, str] | None
) -> Offer | None:
    """The cheapest available offer not tried yet; `place`: the backend and region it must be in."""
    for offer in offers.acceptable_offers(spec, asked):
        if offers.offer_key(offer) in tried or not offers.nodes_available(offer, {}, 1):
            continue
        if place is None or (offer.backend, offer.region) == place:
            return offer
    return None
