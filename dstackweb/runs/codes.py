"""The codes of what happens to runs and of why they wait, with their data.

`wording` makes sentences of them: its types, or the import of a table there, fail for a member without words.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypedDict


class WaitReason(StrEnum):
    """Why a run waits, the most permanent reason first.

    Of reasons that must all be cured the first is shown, of alternatives the last.
    """

    NOT_WAITING = "not_waiting"
    IMPOSSIBLE = "impossible"
    NO_QUOTA = "no_quota"
    BUDGET_LIMIT = "budget_limit"
    QUEUE_PAUSED = "queue_paused"
    USER_LIMIT = "user_limit"
    QUEUE_LIMIT = "queue_limit"
    RESERVED_FOR_OTHER = "reserved_for_other"
    BACKEND_UNAVAILABLE = "backend_unavailable"
    WAITING_FOR_CAPACITY = "waiting_for_capacity"
    STARTING = "starting"

    @property
    def place(self) -> int:
        """Its place in the order of permanence, 0 the most permanent."""
        return _PLACES[self]


_PLACES = {reason: place for place, reason in enumerate(WaitReason)}


def permanence(reason: str, data: Mapping[str, Any]) -> tuple[bool, int]:
    """Sort key of reasons that must all be cured, the most permanent first: what no end of a run cures leads.

    A reason of another version of the server comes last.
    """
    place = WaitReason(reason).place if reason in WaitReason._value2member_map_ else len(_PLACES)
    return not is_permanent(reason, data), place


def is_permanent(reason: str, data: Mapping[str, Any]) -> bool:
    """Whether no end of a run cures it: nothing could provide what the run needs, or it alone exceeds a limit."""
    return reason == WaitReason.IMPOSSIBLE or bool(data.get("never"))


class Impossible(StrEnum):
    """`code` of IMPOSSIBLE."""

    NO_SPOT_ON_HOSTS = "no_spot_on_hosts"
    NO_OFFER = "no_offer"
    IMAGE_NOT_SUPPORTED = "image_not_supported"
    NO_SUCH_PLACE = "no_such_place"
    TOO_LARGE = "too_large"


class Unavailable(StrEnum):
    """`code` of BACKEND_UNAVAILABLE."""

    FAILED = "failed"
    PARTLY_READ = "partly_read"
    """Some of their offers are not known yet."""
    NOT_SERVED = "not_served"
    NO_SUCH_BACKEND = "no_such_backend"
    OTHER_PROJECT = "other_project"
    TOO_LITTLE_ISOLATION = "too_little_isolation"
    NO_BACKEND = "no_backend"
    NO_HOSTS = "no_hosts"
    HOSTS_OFFLINE = "hosts_offline"
    NO_ISOLATION = "no_isolation"
    UNREADABLE = "unreadable"


class LimitCode(StrEnum):
    """`code` of USER_LIMIT and QUEUE_LIMIT: the queue's setting that is reached."""

    MAX_RUNNING = "max_running"
    MAX_GPUS = "max_gpus"
    MAX_RUNNING_PER_USER = "max_running_per_user"
    MAX_GPUS_PER_USER = "max_gpus_per_user"
    COHORT_GPUS = "cohort_gpus"
    """What the queues of its cohort lend each other, which is in use."""


class Reclaim(StrEnum):
    """Whether runs of a queue displace those that hold the GPUs which it has lent to other queues of its cohort."""

    NEVER = "never"
    LOWER_PRIORITY = "lower_priority"
    """Those of a lower priority."""
    ANY = "any"


class LimitData(TypedDict):
    """Of USER_LIMIT and QUEUE_LIMIT. `never`: the run alone asks for more than the limit."""

    code: LimitCode
    limit: int
    used: int
    asked: int
    never: bool


class BudgetData(TypedDict):
    """Of BUDGET_LIMIT, USD as text."""

    budget: str
    spent: str


class ReservedData(TypedDict, total=False):
    """Of RESERVED_FOR_OTHER; moments in ISO 8601. `run` and `project` only for members of that project.

    `spare_s` is what a run takes beyond its `max_duration` before it is gone.
    """

    run: str
    project: str
    starts_at: str | None
    expires_at: str | None
    spare_s: int


class Shortfall(TypedDict, total=False):
    """What a host lacks: `short` lists `gpus`, `cpus`, `memory_mib`, and each of these has its numbers.

    `busy` GPUs are held until `busy_until` (ISO 8601) at the latest. `code` is `offers` where offers were tried;
    `answers` are the codes of why clouds refused some of them lately.
    """

    code: str
    offers: int
    answers: list[str]
    host: str
    short: list[str]
    nodes: int
    nodes_placed: int
    gpus: int
    gpus_free: int
    gpus_held: int
    gpus_outside: int
    gpus_total: int
    cpus: int
    cpus_free: int
    cpus_total: int
    memory_mib: int
    memory_mib_free: int
    memory_mib_total: int
    busy: int
    busy_until: str


class ImpossibleData(Shortfall, total=False):
    """Of IMPOSSIBLE. `refused` counts offers by the code of why the run takes none of them (a PlaceCode)."""

    image: str
    regions: list[str]
    instance_types: list[str]
    labels: list[str]
    missing: list[str]
    hosts_total: int
    isolation: str
    volumes: list[str]
    refused: dict[str, int]


class UnavailableData(TypedDict, total=False):
    """Of BACKEND_UNAVAILABLE and NO_QUOTA: the hosts or backends it is about."""

    code: str
    hosts: list[str]
    backends: list[str]


class PlanNote(StrEnum):
    """What a plan says about a setting. Unlike a warning it needs no confirmation."""

    NOT_PREEMPTED = "not_preempted"
    """`preemptible` in a queue where preemption is off."""
    WEAK_VALUE = "weak_value"
    SERVICE_ENDS = "service_ends"
    """A service with a `max_duration`, which ends it however well it does."""


class ReservationEnd(StrEnum):
    """Why a reservation ended; a reason to wait (WaitReason) stands for a run that waits for something else now."""

    PLACED = "placed"
    LEFT = "left"
    OUTRANKED = "outranked"
    VANISHED = "vanished"
    EXPIRED = "expired"
    QUEUE_PAUSED = "queue_paused"
    UNREADABLE = "unreadable"


class StartBasis(StrEnum):
    """What an estimate of a run's start rests on, or why there is none."""

    NOW = "now"
    """What it needs is free."""
    LEARNED = "learned"
    """The run whose end makes room: how long `runs` runs of its `prefix` lasted."""
    MAX_DURATION = "max_duration"
    """The same, whose latest end is known."""
    NO_END = "no_end"
    """None: what it waits for is held by a run with neither a `max_duration` nor a history."""
    LIMIT = "limit"
    """None: no end of a run meets a limit of its queue."""
    PAUSED = "paused"
    IMPOSSIBLE = "impossible"
    UNAVAILABLE = "unavailable"
    """None: hosts, a quota or a budget are missing, and no run's end brings them back. `reason` is a WaitReason."""
    ELSEWHERE = "elsewhere"
    """None: only clouds or clusters take it, and what they will have is not known ahead."""
    AFTER_RUNS = "after_runs"
    """None yet: it enters its queue when others have ended."""
    SCHEDULED = "scheduled"
    """None yet: it enters its queue at a set time."""
    UNKNOWN = "unknown"
    """None yet: the next estimate includes it."""


class StartData(TypedDict, total=False):
    """Of a StartBasis. `run` is the run whose end makes room, or that has no end; not named for other projects."""

    run: str
    prefix: str
    runs: int
    reason: str


class ScheduleWait(StrEnum):
    """Why the next occurrence of a schedule is not created yet, or never will be."""

    NAME_TAKEN = "name_taken"
    DRAINING = "draining"
    NO_MEMBER = "no_member"
    STOPPED = "stopped"


class MessageCode(StrEnum):
    """`code` of the detail of a run's or job's message: what this server knows, worded when it is read."""

    EXITED = "exited"
    """`exit_code`."""
    OUT_OF_MEMORY = "out_of_memory"
    """`memory_mib`: the job's limit, null where its machine had no more."""
    OUT_OF_DISK = "out_of_disk"
    """`used` and `limit` in bytes, of which `used` is null where files can't be counted; or `free` and `reserve`."""
    CODE_REFUSED = "code_refused"
    """`fault`, `name` of the member at fault, `limit` that was exceeded or null."""
    IMAGE_PULL_FAILED = "image_pull_failed"
    """`fault` and `image`; the message is the engine's."""
    OUT_OF_CAPACITY = "out_of_capacity"
    AFTER = "after"
    """`waits` and `unmet`: the runs (`name`, `on`) that it waits for, and those that ended otherwise (and `status`)."""
    LOW_UTILIZATION = "low_utilization"
    """What was low, as the event has it."""
    LATE = "late"
    """`deadline_s`, and `cause`: the detail before."""
    HOST_SILENT = "host_silent"
    """`host`, `silent_s`."""
    RUNNER_GONE = "runner_gone"
    MACHINE_ASKED = "machine_asked"
    """`exit_code`: the commands were ended by a signal, and the cloud is asked whether their machine is ending."""
    MACHINE_SHUT_DOWN = "machine_shut_down"
    """`exit_code`."""
    GIVEN_UP = "given_up"
    """`host`, `by` and `reason`, if an admin declared that the machine is gone."""
    NO_GPUS = "no_gpus"
    """`instance_type`, `seen`, `total`."""
    INSTALLING_ENGINE = "installing_engine"
    NO_ENGINE = "no_engine"
    """`fault` (`runner.engine.EngineFault`); the message is the installer's."""
    SOURCE_FAILED = "source_failed"
    """`kind` of the backend, `error`: code and data of the cloud's failure."""
    ENGINE_WAITS = "engine_waits"
    """`kind` of the backend, `waits_for`: the code of its engine (`CloudInstance.waits`)."""


class LogCut(StrEnum):
    """Why the server keeps no more of a job's output."""

    JOB_LIMIT = "job_limit"
    PROJECT_QUOTA = "project_quota"


class LogCutData(TypedDict):
    """Of LOG_CUT: what was reached, in bytes."""

    why: LogCut
    limit: int


class DependencyOutcome(StrEnum):
    """What became of a run's wait for the end of another."""

    WAITING = "waiting"
    MET = "met"
    UNMET = "unmet"
    RELEASED = "released"
    """Someone started the run without it."""


class PlaceEnd(StrEnum):
    """What ended a run's place in a queue: a change of it, or the status that the run left for."""

    MOVED = "moved"
    """It waits on with another rank: a move, a priority, a share of its member."""
    QUEUE = "queue"
    """It went to another queue."""
    PROVISIONING = "provisioning"
    FAILED = "failed"
    TERMINATED = "terminated"


class NoRun(StrEnum):
    """Why an index of a sweep has no run."""

    TO_COME = "to_come"
    DROPPED = "dropped"
    """The sweep was stopped before."""
    REMOVED = "removed"


class RunEventKind(StrEnum):
    """Events of a run or of one of its jobs."""

    SUBMITTED = "submitted"
    PRIORITY = "priority"
    MOVED = "moved"
    MOVE_UNDONE = "move_undone"
    QUEUE = "queue"
    RESERVED = "reserved"
    RESERVATION_ENDED = "reservation_ended"
    PENDING = "pending"
    PROVISIONING = "provisioning"
    RUNNING = "running"
    STOP_REQUESTED = "stop_requested"
    TERMINATING = "terminating"
    DONE = "done"
    FAILED = "failed"
    TERMINATED = "terminated"
    RETRY = "retry"
    REQUEUED = "requeued"
    FOLLOWS = "follows"
    RELEASED = "released"
    RETURNED = "returned"
    DISPLACED = "displaced"
    DISPLACES = "displaces"
    EXTENDED = "extended"
    SCHEDULED = "scheduled"
    CAME_ROUND = "came_round"
    NEXT_SCHEDULED = "next_scheduled"
    SCHEDULE_WAITS = "schedule_waits"
    SCHEDULE_ENDED = "schedule_ended"
    REPLACED = "replaced"
    START_DEADLINE = "start_deadline"
    SPOT_INTERRUPTION = "spot_interruption"
    MACHINE_ASKED = "machine_asked"
    UTILIZATION_NOTICE = "utilization_notice"
    UTILIZATION_STOP = "utilization_stop"
    UTILIZATION_WOULD_STOP = "utilization_would_stop"
    UTILIZATION_KEPT = "utilization_kept"
    UTILIZATION_NEXT = "utilization_next"
    UTILIZATION_POLICY_CHANGED = "utilization_policy_changed"
    INACTIVITY_NOTICE = "inactivity_notice"
    INACTIVITY_STOP = "inactivity_stop"
    TASKS_FAIL = "tasks_fail"
    """The share of failures among the tasks of a prefix has risen (`progress.failing`)."""
    SERVICE_HEALTHY = "service_healthy"
    SERVICE_UNHEALTHY = "service_unhealthy"
    OFFER_FAILED = "offer_failed"
    MACHINE_STARTED = "machine_started"
    CLAIMED = "claimed"
    JOB_RUNNING = "job_running"
    LOG_CUT = "log_cut"
    JOB_TERMINATING = "job_terminating"
    JOB_DONE = "job_done"
    JOB_FAILED = "job_failed"
    JOB_TERMINATED = "job_terminated"
