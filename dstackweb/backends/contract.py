"""The protocols of backends, and the data that they exchange with the scheduler. Backends never see a run."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple, Protocol, runtime_checkable
from uuid import UUID

from dstackweb.spec.effective import Requirements


class Availability(enum.StrEnum):
    """Whether an offer is available now. Unknown is not zero: such an offer stays usable."""

    AVAILABLE = "available"
    IDLE = "idle"
    BUSY = "busy"
    NO_QUOTA = "no_quota"
    NOT_AVAILABLE = "not_available"
    UNKNOWN = "unknown"


class LaunchFailure(enum.StrEnum):
    """Why a cloud refused to launch an instance."""

    NO_CAPACITY = "no_capacity"
    NO_ROOM = "no_room"
    """A cluster that could run it is full now: its run waits at its place in the queue."""
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
    """Why a cloud instance ended, or was never launched."""

    NOT_STARTED = "not_started"
    NO_ROOM = "no_room"
    """Others got the room that its engine was to start it in, and it waited there."""
    NO_GPUS = "no_gpus"
    INTERRUPTED = "interrupted"
    """The cloud reclaimed a spot instance."""
    CLOUD = "cloud"
    """A failure, or a person terminated it in the cloud's console."""
    UNREACHABLE = "unreachable"
    """The cloud could not be called for it."""
    SILENT = "silent"
    OVERDUE = "overdue"
    FINISHED = "finished"
    IDLE = "idle"
    STOPPED = "stopped"
    """A person stopped it here."""
    DELETED = "deleted"
    """Its backend was deleted."""
    DISABLED = "disabled"
    """Its backend was disabled before it was launched."""


class PlaceCode(enum.StrEnum):
    """Whether a host, an offer or a backend accepts a job now, or why not.

    For a host the most permanent reason counts: TOO_SMALL, NO_ISOLATION, OFFLINE, DRAINING, HELD_BACK, BUSY.
    """

    FITS = "fits"
    RESERVED = "reserved"
    TOO_SMALL = "too_small"
    NO_ISOLATION = "no_isolation"
    OFFLINE = "offline"
    DRAINING = "draining"
    HELD_BACK = "held_back"
    BUSY = "busy"
    NO_QUOTA = "no_quota"
    NOT_AVAILABLE = "not_available"
    IMAGE_NOT_SUPPORTED = "image_not_supported"
    VOLUME_NOT_LISTED = "volume_not_listed"
    OTHER_REGION = "other_region"
    OTHER_INSTANCE_TYPE = "other_instance_type"
    HAS_NO_LABELS = "has_no_labels"
    TOO_LITTLE_ISOLATION = "too_little_isolation"
    IS_SPOT = "is_spot"
    IS_ON_DEMAND = "is_on_demand"
    TOO_EXPENSIVE = "too_expensive"
    NOT_NAMED = "not_named"
    NO_SUCH_BACKEND = "no_such_backend"
    OTHER_PROJECT = "other_project"
    NOT_SERVED = "not_served"
    FAILED = "failed"
    PARTLY_READ = "partly_read"


@dataclass(frozen=True)
class LaunchSpec:
    """One node of one attempt: all that a backend knows of a run.

    The runner fetches the commands itself, with the token, from `api_url`. `run_uid` names the run's
    directory, which attempts share.
    """

    job: UUID
    run_uid: UUID
    node: int
    api_url: str
    token: str = field(repr=False)
    image: str | None = None


@dataclass(frozen=True)
class Offer:
    """One way to get the required resources. `price` is USD per hour; `detail` is a code with its numbers.

    Where something prevents all offers of a backend, `detail["quota"]` is what it would be otherwise.
    """

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
    kind: str = field(default="", compare=False)
    """The backend's kind, set by `offers.catalog`: its words describe `detail`."""


class Presence(enum.StrEnum):
    """What is left of a started job."""

    ALIVE = "alive"
    """Its runner is alive."""
    ORPHANED = "orphaned"
    """Its runner is dead, and processes of the job are alive: its resources stay held."""
    GONE = "gone"
    """Confirmed: its runner and all its processes have ended."""


class Backend(Protocol):
    """A backend that makes offers without a network."""

    def offers(self, requirements: Requirements, *, image: str | None = None) -> Sequence[Offer]:
        """Every way to get the requirements (per node), best first, including unavailable ones.

        A placement pass waits for the answer, so this never uses a network. If nothing is known it raises an exception:
        an empty list says that there never is an offer. `detail["fits"]`, if present, is how many nodes fit now.
        """


@runtime_checkable
class Hosts(Protocol):
    """A backend that starts runners on existing machines. Each call may be repeated, doubled or lost."""

    def start(self, launch: LaunchSpec, host_id: int) -> None:
        """Start the job's runner on its host, once. Raises StartFailed."""

    def observe(self, job: UUID) -> Presence:
        """What is left of the job."""

    def stop(self, job: UUID, grace_s: int | None) -> bool:
        """End the job within the grace, or at once if None. True when it is confirmed gone."""


class SourceKey(NamedTuple):
    """One kind of data that a backend reads from its cloud; `region` is empty if it is the same everywhere."""

    source: str
    region: str


class Hidden(enum.StrEnum):
    """Which offers in a source's region are not listed while it could not be read yet."""

    ALL = "all"
    SPOT = "spot"
    ON_DEMAND = "on-demand"
    NONE = "none"
    """All are listed, with something unknown of them."""


class OfferPart(enum.StrEnum):
    """A part of an offer that a source provides."""

    SHAPE = "shape"
    """The offers that exist, with their hardware."""
    PRICE = "price"
    AVAILABILITY = "availability"


class SourceSpec(NamedTuple):
    """How long data of a source counts as fresh, and its type: it is stored as JSON that pydantic reads back.

    `settings` are those that it depends on, beside the secret: a change of others keeps it. Empty: all. `choice` are
    settings that say which part of it is read: after a change the old data is used, as stale, until the new data is
    there, so `join` has to leave out what they don't allow any more. One that `moves` changes with each instance that
    starts or ends, and is read again after that. `hides`: the offers that are missing without it. `tells`: the part of
    an offer that has its age.
    """

    ttl_s: float
    type: Any
    settings: tuple[str, ...] = ()
    choice: tuple[str, ...] = ()
    moves: bool = False
    hides: Hidden = Hidden.ALL
    tells: OfferPart = OfferPart.AVAILABILITY


class SourceFailure(enum.StrEnum):
    """Why a source could not be read, with the data of each code."""

    ACCESS_DENIED = "access_denied"
    """The credentials lack a permission: `action`."""
    BAD_CREDENTIALS = "bad_credentials"
    NO_CREDENTIALS = "no_credentials"
    THROTTLED = "throttled"
    """Retry at `until`."""
    UNREACHABLE = "unreachable"
    """`endpoint`."""
    REGION_DISABLED = "region_disabled"
    """`region`."""
    NONSENSE = "nonsense"
    """The answer of `api` can't be read: `what` is a NonsenseAnswer."""
    EMPTIED = "emptied"
    """The answer was empty, and the last one was not: it counts once it comes again."""
    SERVICE_ERROR = "service_error"
    """Anything else: `text`."""
    NOT_READ = "not_asked"
    NO_ANSWER = "no_answer"
    """A call is under way, and has no answer yet after some seconds."""
    DELETED = "deleted"
    """The backend was deleted."""


class NonsenseAnswer(enum.StrEnum):
    """A fault of an answer: `what` of SourceFailure.NONSENSE."""

    UNREADABLE = "unreadable"
    """The answer is not in the format of its protocol: `text`."""
    MISSING = "missing"
    """The answer lacks `key`, or has a value of another type there."""
    ITEMS = "items"
    """No item of the answer can be read."""
    PAGES = "pages"
    """The pages of the answer have no end."""


class SourceFailed(Exception):
    """A source could not be read. `code` is a SourceFailure, or a code that the backend's kind words itself."""

    def __init__(self, code: str, **data: Any) -> None:
        super().__init__(f"{code}: {data}" if data else code)
        self.code, self.data = code, data


def nonsense(api: str, what: NonsenseAnswer = NonsenseAnswer.UNREADABLE, **data: Any) -> SourceFailed:
    """An answer of `api` that can't be read."""
    return SourceFailed(SourceFailure.NONSENSE, api=api, what=what, **data)


class SourceState(enum.StrEnum):
    """How current the data of a source is."""

    FRESH = "fresh"
    STALE = "stale"
    """The last good value, older than its TTL or of other settings."""
    FAILED = "failed"
    """Nothing is known."""


@dataclass(frozen=True)
class SourceReading:
    """The data of a source. `error` is its latest failure (code and data) since the last success."""

    state: SourceState
    value: Any = None
    fetched_at: dt.datetime | None = None
    error: dict[str, Any] | None = None
    number: int = 0
    """The number of the call that read it, which rises with each call of all sources."""
    is_refuted: bool = False
    """Whether an order was refused for lack of room after it had begun."""


class Sourced(Protocol):
    """A backend that makes offers from several sources of a cloud, each with its own age."""

    sources: Mapping[str, SourceSpec]

    def wanted(self) -> Sequence[SourceKey]:
        """All sources that its settings need."""

    def fetch(self, key: SourceKey) -> Any:
        """Read a source from the cloud: a value of its type, falsy if empty, never None. Raises SourceFailed."""

    def join(
        self, readings: Mapping[SourceKey, SourceReading], requirements: Requirements, *, image: str | None = None
    ) -> Sequence[Offer]:
        """`Backend.offers` from the readings, and the rows of its own instances. Raises SourceFailed if nothing is
        known."""


class Quota(NamedTuple):
    """A limit of an account, and how much of it is in use (None: unknown), in the cloud's own unit."""

    limit: int
    used: int | None


@runtime_checkable
class LimitedByQuotas(Protocol):
    """A `Sourced` backend whose cloud limits what an account may use in a region. Optional.

    `limits` and `use` are the sources of both. Its own instances count from their rows: `join` and `quotas` add them.
    """

    limits: str
    use: str

    def quotas(self, readings: Mapping[SourceKey, SourceReading], region: str) -> Mapping[str, Quota]:
        """The known quotas by the cloud's code. Without a network."""


class Allocation(Protocol):
    """The part of a cluster that an order takes; offers, orders and instances have these fields."""

    @property
    def region(self) -> str: ...
    @property
    def instance_type(self) -> str: ...
    @property
    def cpus(self) -> int: ...
    @property
    def memory_mib(self) -> int: ...
    @property
    def gpu_count(self) -> int: ...


@runtime_checkable
class Counted(Sourced, Protocol):
    """A `Sourced` backend that gives parts of machines, and counts in one source what is free of them.

    A value counts what had been ordered when its call began. The scheduler takes later orders from it, so that no room
    is given twice.
    """

    @property
    def key(self) -> SourceKey:
        """The backend's only source."""

    def take(self, value: Any, order: Allocation) -> Any:
        """The source's value without the room that an order takes; None where it has no room for it. Pure."""


@dataclass(frozen=True)
class InstanceOrder:
    """An instance to launch. `instance` (a UUID) makes the order safe to repeat, and tags the instance.

    `deployment` identifies this deployment's instances; `project` and `run` are for people at the cloud's console.
    `cpus` and what follows is what the job gets of an engine that allocates parts of machines.
    """

    instance: str
    deployment: str
    region: str
    instance_type: str
    spot: bool
    user_data: str = field(repr=False)
    zones: tuple[str, ...] = ()
    """Where to try to launch, in order; empty: anywhere in the region."""
    full_zones: tuple[str, ...] = ()
    """Zones that refused the same lately, which are not tried."""
    project: str = ""
    run: str = ""
    cpus: int = 0
    memory_mib: int = 0
    gpu_name: str = ""
    gpu_count: int = 0
    is_new: bool = False
    """Whether it was never sent before, or all answers were refusals: so there is none to be found."""
    duration_s: int | None = None
    """How long the job may take at most, with the time to stop; None: unlimited."""


class InstanceState(enum.StrEnum):
    """The state of a cloud instance. A stopped one exists, and still has to be terminated."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    ENDING = "ending"
    GONE = "gone"


@dataclass(frozen=True)
class CloudInstance:
    """An instance as its cloud describes it. `instance` is the order's UUID from its tag; empty without a tag.

    `cloud_id` stays its own for ever: it is what `terminate` ends. Where an engine may give an ID twice, such as after
    it lost its state, the driver adds to it what makes it unique.

    `why` is InstanceEnd's `interrupted` or `cloud`, or empty if it is alive or nothing is known.
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
    waits: str = ""
    """The engine's own code of what it waits for before it starts it (`Kind.wait_reason`); empty: nothing is known."""
    lacks_room: bool = False
    """Whether it waits in its engine's queue because others got the room: it is taken back into ours."""


class LaunchFailed(Exception):
    """The cloud refuses this instance, because of its capacity or our settings: another offer may work.

    `text` is the cloud's message. If only one zone refused, `data` has that `zone`, and `elsewhere` if the order may be
    repeated at once for another one. Of several zones that lack capacity, a call tries one.
    """

    def __init__(self, code: LaunchFailure, text: str = "", **data: Any) -> None:
        super().__init__(f"{code}: {text}" if text else code)
        self.code, self.text, self.data = code, text, data


@runtime_checkable
class Cloud(Protocol):
    """A backend that launches instances. All calls use the network, and raise SourceFailed if the cloud can't be
    called: then nothing is concluded, and the same call is made again later."""

    def launch(self, order: InstanceOrder) -> CloudInstance:
        """Launch it; the same order again returns the same instance, which may have ended. Raises LaunchFailed."""

    def instances(self, region: str, deployment: str) -> Sequence[CloudInstance]:
        """All instances of the deployment in a region, and those that ended lately.

        A cloud may leave out new ones for some seconds. If it lists two of an order, the one from `launch` counts, and
        the other has to be terminated.
        """

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        """Terminate instances; unknown IDs are no error. Only `instances` confirms that they have ended."""

    def regions(self) -> Sequence[str]:
        """Where it may have instances, by its settings."""


@dataclass(frozen=True)
class InstanceUsage:
    """What an engine's accounting says that an ended instance used, the runner included. None: it does not say.

    `cpu_reserved_s` is its CPUs times `elapsed_s`. `billed_h` is in hours of the engine's own unit of billing.
    """

    elapsed_s: int | None = None
    cpu_reserved_s: int | None = None
    cpu_used_s: float | None = None
    memory_peak_mib: int | None = None
    billed_h: float | None = None
    energy_j: int | None = None


@runtime_checkable
class Accounting(Protocol):
    """A `Cloud` whose engine keeps accounts of what instances used. Optional."""

    def accounting(self, region: str, cloud_ids: Sequence[str]) -> Mapping[str, InstanceUsage] | None:
        """What these ended instances used, by cloud ID; None if the engine keeps no accounts.

        Those that are not accounted for yet are left out, and asked for again for some minutes. Uses the network, and
        raises SourceFailed without an answer, as the calls of `Cloud` do.
        """


class StartFailed(Exception):
    """The backend could not start a job's runner."""
