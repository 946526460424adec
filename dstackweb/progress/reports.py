"""Reports: their JSON, parsed to plain data.

An invalid entry is rejected alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NotRequired, TypeVar

from django.utils.translation import gettext as _
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from dstackweb.lib.errors import Invalid, TooLarge
from dstackweb.progress.keys import split
from dstackweb.progress.models import KEY_MAX, NAME_MAX
from dstackweb.progress.states import ALIASES, COUNTED, TaskState

ENTRIES_MAX = 5000
REPORTER_MAX = 100
MESSAGE_MAX = 2000
SEQ_MAX = 2**53
"""The largest integer that every JSON reader represents exactly."""
COUNT_MAX = 10**12
SECONDS_MAX = 1e12
STORABLE = r"^[^\x00]*$"
"""No NUL, which PostgreSQL can't store. Lone surrogates are no text for pydantic either."""

T = TypeVar("T")

EntryList = Literal["events", "counts", "failures"]
"""Name of a list of a batch."""


@dataclass(frozen=True, slots=True)
class Event:
    """One task entered a state. Per task the event with the highest (seq, reporter) counts; forgotten is final."""

    key: str
    state: TaskState
    seq: int
    prefix: str
    group: str
    duration_s: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """Number of a group's tasks in each state now, by one reporter; number of timed tasks and their total seconds."""

    prefix: str
    group: str
    seq: int
    states: Mapping[TaskState, int]
    duration_n: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed task, reported in addition to counts, which have no keys."""

    key: str
    prefix: str
    group: str
    seq: int
    message: str


@dataclass(frozen=True, slots=True)
class Batch:
    """The reports of one request. `ended_seq`: the reporter has ended; its live tasks up to here are released.

    `heartbeat_s`: the reporter sends at least an empty batch within so many seconds; None if it promises nothing.
    """

    reporter: str
    events: tuple[Event, ...] = ()
    counts: tuple[Count, ...] = ()
    failures: tuple[Failure, ...] = ()
    ended_seq: int | None = None
    heartbeat_s: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it only says that the reporter goes on."""
        return self.ended_seq is None and not (self.events or self.counts or self.failures)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected entry: its list and index there, its key (of counts the prefix), the reason's code, and a sentence."""

    list: EntryList
    index: int
    key: str
    reason: str
    detail: str = ""


@dataclass(slots=True)
class Receipt:
    """Result of a batch. `outdated`: number of entries that were known already or older than known ones."""

    applied: int = 0
    outdated: int = 0
    rejected: list[Rejection] = field(default_factory=list)


def _storable(message: object) -> object:
    """Shorten a message, and replace characters that cannot be stored with question marks."""
    if type(message) is not str:
        return message
    return message[:MESSAGE_MAX].encode("utf-8", "replace").decode().replace("\0", "?")


if TYPE_CHECKING:
    Word = str
    CountedWord = str
else:
    Word = Literal[tuple(ALIASES)]
    CountedWord = Literal[tuple(COUNTED)]
Key = Annotated[str, Field(min_length=1, max_length=KEY_MAX, pattern=STORABLE)]
Name = Annotated[str, Field(max_length=NAME_MAX, pattern=STORABLE)]
Prefix = Annotated[Name | None, Field(description="Default: derived from the key")]
Group = Annotated[Name | None, Field(description="Default: the prefix, or derived from the key")]
Seq = Annotated[int | None, Field(ge=0, le=SEQ_MAX, description="Increases; default: the body's")]
Number = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)]
Message = Annotated[str | None, BeforeValidator(_storable), Field(description="Why it failed, or what it is doing")]


@with_config(extra="forbid", strict=True)
class EventEntry(TypedDict):
    """An event as reported."""

    key: Key
    state: Word
    seq: NotRequired[Seq]
    prefix: NotRequired[Prefix]
    group: NotRequired[Group]
    duration_s: NotRequired[Seconds | None]
    message: NotRequired[Message]


@with_config(extra="forbid", strict=True)
class CountEntry(TypedDict):
    """A count as reported."""

    prefix: Annotated[Name, Field(min_length=1)]
    states: dict[CountedWord, Number]
    group: NotRequired[Group]
    seq: NotRequired[Seq]
    duration_n: NotRequired[Annotated[Number | None, Field(description="How many finished tasks were timed so far")]]
    duration_s: NotRequired[Annotated[Seconds | None, Field(description="Total duration of the timed tasks so far")]]


@with_config(extra="forbid", strict=True)
class FailureEntry(TypedDict):
    """A failure as reported."""

    key: Key
    seq: NotRequired[Seq]
    prefix: NotRequired[Prefix]
    group: NotRequired[Group]
    message: NotRequired[Message]


@with_config(extra="forbid", strict=True)
class Body(TypedDict):
    """A report; its entries are parsed one by one."""

    reporter: NotRequired[Annotated[str, Field(min_length=1, max_length=REPORTER_MAX, pattern=STORABLE)] | None]
    seq: NotRequired[
        Annotated[Seq, Field(description="For entries without one; default: the server's time in microseconds")]
    ]
    events: NotRequired[list[Any] | None]
    counts: NotRequired[list[Any] | None]
    failures: NotRequired[list[Any] | None]
    ended: NotRequired[
        Annotated[bool | None, Field(description="The reporter has finished: its unfinished tasks are released")]
    ]
    heartbeat_s: NotRequired[
        Annotated[
            int | None,
            Field(ge=1, le=3600, description="Another request, if only an empty one, follows within so many seconds"),
        ]
    ]
    attempt: NotRequired[Annotated[int | None, Field(ge=1, description="409 unless it is the current attempt")]]


BODY: Final = TypeAdapter(Body)
EVENTS: Final = TypeAdapter(list[EventEntry])
COUNTS: Final = TypeAdapter(list[CountEntry])
FAILURES: Final = TypeAdapter(list[FailureEntry])
_NAMES = {"prefix": "bad_name", "group": "bad_name", "seq": "bad_seq"}
REASONS: Final[dict[EntryList, dict[str, str]]] = {
    "events": {**_NAMES, "key": "bad_key", "state": "unknown_state"},
    "counts": _NAMES,
    "failures": {**_NAMES, "key": "bad_key"},
}
"""Why an entry is rejected, by its invalid field; else it is malformed."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request. `positions`: for each list of the batch, the indices of its entries in the request."""

    batch: Batch
    attempt: int | None
    rejected: list[Rejection]
    positions: dict[EntryList, list[int]]

    @property
    def entries(self) -> int:
        """Number of entries, valid or not."""
        return sum(map(len, self.positions.values())) + len(self.rejected)


def parse_request(given: object, reporter: str, seq: int) -> ParsedRequest:
    """Parse a request. `reporter` and `seq` are the defaults.

    Raises Invalid for a request without the documented form, and TooLarge for more than ENTRIES_MAX entries.
    """
    try:
        body = BODY.validate_python(_bounded(given, Body.__annotations__))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise Invalid.at(*map(_printable, map(str, fault["loc"])), msg=fault["msg"]) from None
    lists: dict[EntryList, list[Any]] = {
        "events": body.get("events") or [],
        "counts": body.get("counts") or [],
        "failures": body.get("failures") or [],
    }
    if sum(map(len, lists.values())) > ENTRIES_MAX:
        raise TooLarge(
            _("at most %(entries_max)s entries in one request") % {"entries_max": f"{ENTRIES_MAX:,}"}, most=ENTRIES_MAX
        )
    own_seq = body.get("seq")
    default = seq if own_seq is None else own_seq
    rejected: list[Rejection] = []
    positions: dict[EntryList, list[int]] = {}

    def valid(name: EntryList, adapter: TypeAdapter[list[T]], fields: Collection[str]) -> list[T]:
        entries, bad = [_bounded(entry, fields) for entry in lists[name]], dict[int, ErrorDetails]()
        try:
            return adapter.validate_python(entries)
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                bad.setdefault(int(fault["loc"][0]), fault)
            return adapter.validate_python([entry for at, entry in enumerate(entries) if at not in bad])
        finally:
            positions[name] = [at for at in range(len(entries)) if at not in bad]
            rejected.extend(_rejection(name, at, entries[at], fault) for at, fault in sorted(bad.items()))

    placed: dict[str, tuple[str, str]] = {}
    events = tuple([_event(given, default, placed) for given in valid("events", EVENTS, EventEntry.__annotations__)])
    counts = tuple([_count(given, default) for given in valid("counts", COUNTS, CountEntry.__annotations__)])
    failures = tuple([_failure(given, default) for given in valid("failures", FAILURES, FailureEntry.__annotations__)])
    ended_seq = None
    if body.get("ended"):
        seqs = [entry.seq for entries in (events, counts, failures) for entry in entries]
        ended_seq = max(seqs if seqs and own_seq is None else [default, *seqs])
    heartbeat_s = body.get("heartbeat_s")
    batch = Batch(body.get("reporter") or reporter[:REPORTER_MAX], events, counts, failures, ended_seq, heartbeat_s)
    return ParsedRequest(batch, body.get("attempt"), rejected, positions)


def with_messages(batch: Batch, change: Callable[[str], str]) -> Batch:
    """The batch with each message changed; `change` is called for no empty one."""
    if not any(entry.message for entries in (batch.events, batch.failures) for entry in entries):
        return batch
    events = tuple([replace(each, message=change(each.message)) if each.message else each for each in batch.events])
    failures = tuple([replace(each, message=change(each.message)) if each.message else each for each in batch.failures])
    return replace(batch, events=events, failures=failures)


def with_names(batch: Batch, change: Callable[[Collection[str]], Mapping[str, str]]) -> Batch:
    """The batch with other keys, prefixes, groups and reporter: those that `change` has another one for.

    A prefix and a group that come from a key come from the changed one.
    """
    tasks: tuple[Event | Failure, ...] = (*batch.events, *batch.failures)
    entries: tuple[Event | Failure | Count, ...] = (*tasks, *batch.counts)
    names = {entry.key for entry in tasks}.union({batch.reporter}, *((entry.prefix, entry.group) for entry in entries))
    if not names or not (new := change(names)):
        return batch

    def placed(entry: Event | Count | Failure, key: str = "") -> dict[str, Any]:
        if key in new and (entry.prefix, entry.group) == split(key):
            return split(new[key])._asdict()
        return {"prefix": new.get(entry.prefix, entry.prefix), "group": new.get(entry.group, entry.group)}

    events = tuple([replace(each, key=new.get(each.key, each.key), **placed(each, each.key)) for each in batch.events])
    failures = tuple(
        [replace(each, key=new.get(each.key, each.key), **placed(each, each.key)) for each in batch.failures]
    )
    counts = tuple([replace(each, **placed(each)) for each in batch.counts])
    reporter = new.get(batch.reporter, batch.reporter)
    return replace(batch, reporter=reporter, events=events, counts=counts, failures=failures)


def _bounded(given: object, fields: Collection[str]) -> object:
    """A mapping with at most one unknown field, and at most one unknown state: pydantic would report them all."""
    if type(given) is not dict:
        return given
    if len(given) > len(fields):
        given = _with_one_unknown(given, fields)
    states = given.get("states")
    if type(states) is dict and len(states) > len(COUNTED):
        given = {**given, "states": _with_one_unknown(states, COUNTED)}
    return given


def _with_one_unknown(given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    unknown = next(name for name in given if name not in known)
    return {name: value for name, value in given.items() if name in known or name == unknown}


def _event(given: EventEntry, default: int, placed: dict[str, tuple[str, str]]) -> Event:
    """`placed`: prefix and group of the request's earlier tasks. A task keeps those of its first report."""
    key, seq = given["key"], given.get("seq")
    prefix, group = placed.get(key) or placed.setdefault(key, _prefix_and_group(given))
    return Event(
        key,
        ALIASES[given["state"]],
        default if seq is None else seq,
        prefix,
        group,
        given.get("duration_s"),
        given.get("message") or "",
    )


def _count(given: CountEntry, default: int) -> Count:
    prefix, seq = given["prefix"], given.get("seq")
    states: dict[TaskState, int] = {}
    for word, number in given["states"].items():
        state = COUNTED[word]
        states[state] = states.get(state, 0) + number
    return Count(
        prefix,
        given.get("group") or prefix,
        default if seq is None else seq,
        states,
        given.get("duration_n") or 0,
        given.get("duration_s") or 0.0,
    )


def _failure(given: FailureEntry, default: int) -> Failure:
    seq = given.get("seq")
    message = given.get("message") or ""
    return Failure(given["key"], *_prefix_and_group(given), default if seq is None else seq, message)


def _prefix_and_group(given: EventEntry | FailureEntry) -> tuple[str, str]:
    """Prefix and group: as given, else from the key. A given prefix is the default group."""
    prefix, group = given.get("prefix"), given.get("group")
    if prefix:
        return prefix, group or prefix
    from_key = split(given["key"])
    return from_key.prefix, group or from_key.group


def _rejection(name: EntryList, index: int, entry: object, fault: ErrorDetails) -> Rejection:
    _index, *where = map(str, fault["loc"])
    reason = REASONS[name].get(where[0], "malformed") if where else "malformed"
    if where[-1:] == ["[key]"]:
        reason = "unknown_state"
    elif name == "counts" and fault["type"] in ("missing", "string_too_short"):
        reason = "malformed"
    key = entry.get("prefix" if name == "counts" else "key") if isinstance(entry, dict) else None
    detail = _printable(": ".join([*where[:1], fault["msg"]]))
    return Rejection(name, index, _printable(key) if type(key) is str else "", reason, detail)


def _printable(text: str) -> str:
    """A given text, shortened, in characters that every response can contain."""
    return text[:KEY_MAX].encode("utf-8", "replace").decode()
