"""What every kind of backend offers to the rest. Backends never see a run: a LaunchSpec goes down."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple, Protocol, runtime_checkable

from dstackweb.spec.effective import Requirements


class Availability(enum.StrEnum):
    """How likely an offer is to be had now. Unknown is not zero: such an offer stays usable."""

    AVAILABLE = "available"
    IDLE = "idle"
    BUSY = "busy"
    NO_QUOTA = "no_quota"
    NOT_AVAILABLE = "not_available"
    UNKNOWN = "unknown"


class LaunchFailure(enum.StrEnum):
    """Why a cloud refused to launch an instance."""

    NO_CAPACITY = "no_capacity"
    QUOTA = "quota"
    SPOT_PRICE = "spot_price"
    NOT_ALLOWED = "not_allowed"
    """The credentials lack a permission: `action`."""
    AMI = "ami"
    """No image can be used."""
    NETWORK = "network"
    REFUSED = "refused"
    """Anything else."""


class InstanceEnd(enum.StrEnum):
    """Why a cloud instance ended that was launched, or that the cloud was asked for."""

    NOT_STARTED = "not_started"
    NO_GPUS = "no_gpus"
    INTERRUPTED = "interrupted"
    """The cloud reclaimed a spot instance."""
    CLOUD = "cloud"
    """A failure, or somebody ended it in the cloud's console."""
    UNREACHABLE = "unreachable"
    """The cloud could not be asked for it."""
    SILENT = "silent"
    OVERDUE = "overdue"
    FINISHED = "finished"
    IDLE = "idle"
    STOPPED = "stopped"
    """Somebody stopped it here."""
    DELETED = "deleted"
    """Its backend was deleted."""


class PlaceCode(enum.StrEnum):
    """Whether a place (a host, an offer, a backend as a whole) takes a job now, or why it doesn't.

    Of a host the most permanent comes first: TOO_SMALL, NO_ISOLATION, OFFLINE, DRAINING, BUSY.
    """

    FITS = "fits"
    RESERVED = "reserved"
    TOO_SMALL = "too_small"
    NO_ISOLATION = "no_isolation"
    OFFLINE = "offline"
    DRAINING = "draining"
    BUSY = "busy"
    NO_QUOTA = "no_quota"
    NOT_AVAILABLE = "not_available"
    IMAGE_NOT_SUPPORTED = "image_not_supported"
    OTHER_REGION = "other_region"
    OTHER_INSTANCE_TYPE = "other_instance_type"
    HAS_NO_LABELS = "has_no_labels"
    IS_SPOT = "is_spot"
    IS_ON_DEMAND = "is_on_demand"
    TOO_EXPENSIVE = "too_expensive"
    NOT_NAMED = "not_named"
    NO_SUCH_BACKEND = "no_such_backend"
    NOT_SERVED = "not_served"
    FAILED = "failed"


@dataclass(frozen=True)
class LaunchSpec:
    """One node of one attempt: all that a backend knows of a run.

    The runner fetches the commands itself, with the token, from `api_url`. `run_uid` names the run's
    directory, which attempts share; `gpu_uuids` are NVML's.
    """

    job_id: str
    run_name: str
    run_uid: str
    attempt: int
    node: int
    nodes: int
    cpus: int
    memory_mib: int
    api_url: str
    token: str = field(repr=False)
    gpu_uuids: tuple[str, ...] = ()


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
    kind: str = field(default="", compare=False)
    """The backend's kind, filled in by `offers.catalog`: whose words describe `detail`."""


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
    """A kind of backend that says what it offers without asking a network."""

    def offers(self, requirements: Requirements, *, image: str | None = None) -> Sequence[Offer]:
        """Every way to get the requirements (per node), best first, those that can't be had now included.

        Reads cached sources only: a placement pass waits for the answer, so it never waits for a network. Unknown is
        not zero, and nothing known at all is an exception, not an empty list, which says that there never is a way.
        `detail["fits"]`, where it is there, is how many nodes the offer takes now.
        """
        ...


@runtime_checkable
class Hosts(Protocol):
    """A backend that starts runners on machines that are there. Each call may be repeated, doubled or lost."""

    def start(self, launch: LaunchSpec, offer: Offer) -> Handle:
        """Start the job's runner; a second call for the same job starts nothing. Raises StartFailed."""
        ...

    def observe(self, handle: Handle) -> Presence:
        """What is left of the job."""
        ...

    def stop(self, handle: Handle, grace_s: int | None) -> bool:
        """Have the job end within the grace, or at once with None. True when all of it is confirmed gone."""
        ...


class SourceKey(NamedTuple):
    """One thing that a backend asks its cloud for; `region` is empty where it is the same everywhere."""

    source: str
    region: str


class SourceFailed(Exception):
    """Why a source could not be asked: a code that a person can act on, and its data (names, numbers, texts).

    `access_denied` (action), `bad_credentials`, `no_credentials`, `throttled` (until), `unreachable` (endpoint),
    `region_disabled` (region), `service_error` (text).
    """

    def __init__(self, code: str, **data: Any) -> None:
        super().__init__(f"{code}: {data}" if data else code)
        self.code, self.data = code, data


class SourceState(enum.StrEnum):
    """How far what a source said can be trusted now."""

    FRESH = "fresh"
    STALE = "stale"
    """Older than it should be, or asked for anew without success: the last good value."""
    FAILED = "failed"
    """Nothing is known."""


@dataclass(frozen=True)
class SourceReading:
    """What is known of a source. `error` is its latest failure (code and data), if it has not succeeded since."""

    state: SourceState
    value: Any = None
    fetched_at: dt.datetime | None = None
    error: dict[str, Any] | None = None


class Sourced(Protocol):
    """A backend whose offers are put together from what its cloud says of several things, each with its own age."""

    sources: Mapping[str, float]
    """By name, for how many seconds what it said is fresh."""

    def wanted(self) -> Sequence[SourceKey]:
        """All that its configuration makes it ask for."""
        ...

    def fetch(self, key: SourceKey) -> Any:
        """Ask the cloud: something that pickles, and that is falsy when it is empty. Raises SourceFailed."""
        ...

    def join(
        self, readings: Mapping[SourceKey, SourceReading], requirements: Requirements, *, image: str | None = None
    ) -> Sequence[Offer]:
        """`Backend.offers` from what is known: pure. Raises SourceFailed where that is nothing at all."""
        ...


@dataclass(frozen=True)
class InstanceOrder:
    """A machine to have started. `instance` (a UUID) makes the order safe to repeat, and tags what comes of it.

    `deployment` tells the machines of this deployment from all others; `project` and `run` are for people who look at
    the cloud's own console.
    """

    instance: str
    deployment: str
    region: str
    instance_type: str
    spot: bool
    user_data: str = field(repr=False)
    zones: tuple[str, ...] = ()
    """Where it may start, and in which order that is tried; empty: anywhere in the region."""
    project: str = ""
    run: str = ""


class InstanceState(enum.StrEnum):
    """How far a cloud's machine is. One that is stopped, by hand or by the cloud, is there, and has to be ended."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    ENDING = "ending"
    GONE = "gone"


@dataclass(frozen=True)
class CloudInstance:
    """A machine as its cloud tells of it. `instance` is the order's, from its tag; empty where there is no such tag.

    `why` says who ended it: `interrupted` (the cloud took a spot machine back), `cloud` (a failure, or somebody at the
    cloud's console), empty when nothing is known or it lives.
    """

    instance: str
    cloud_id: str
    region: str
    state: InstanceState
    zone: str = ""
    address: str = ""
    launched_at: dt.datetime | None = None
    why: str = ""
    text: str = ""


class LaunchFailed(Exception):
    """The cloud refuses this machine now, for want of capacity or for what is configured: another offer may do.

    `text` is what the cloud said.
    """

    def __init__(self, code: LaunchFailure, text: str = "", **data: Any) -> None:
        super().__init__(f"{code}: {text}" if text else code)
        self.code, self.text, self.data = code, text, data


@runtime_checkable
class Cloud(Protocol):
    """A backend that starts machines. All calls speak to the cloud's network, and raise SourceFailed where it can't be
    asked now: then nothing is known, nothing is concluded, and the same call is made again later."""

    def launch(self, order: InstanceOrder) -> CloudInstance:
        """Start it; the same order again gives the same machine, which may have ended since. Raises LaunchFailed."""
        ...

    def instances(self, region: str, deployment: str) -> Sequence[CloudInstance]:
        """All machines of the deployment in a region, and those that have lately gone.

        A cloud that has just started a machine may leave it out for some seconds. In the worst case two of an
        instance are told of: then the one that `launch` gave is it, and the other has to end.
        """
        ...

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        """Have machines end; those that aren't there are no error. Only `instances` tells that they have ended."""
        ...

    def regions(self) -> Sequence[str]:
        """Where it may have machines by its configuration."""
        ...


class StartFailed(Exception):
    """The backend could not start a job's runner; the text says why."""
