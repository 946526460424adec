"""Parse the JSON of a report. An invalid entry is rejected alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from dstackweb.lib.errors import Invalid, TooLarge
from dstackweb.progress.events import Batch, Count, EntryList, Event, Failure, Rejection
from dstackweb.progress.models import KEY_MAX, NAME_MAX
from dstackweb.progress.prefixes import split
from dstackweb.progress.states import ALIASES, TaskState

ENTRIES_MAX = 5000
REPORTER_MAX = 100
MESSAGE_MAX = 2000
SEQ_MAX = 2**53
"""The largest integer that every JSON reader represents exactly."""
COUNT_MAX = 10**12
SECONDS_MAX = 1e12

T = TypeVar("T")

BODY_FIELDS: Final = frozenset({"reporter", "seq", "events", "counts", "failures", "ended", "attempt"})
EVENT_FIELDS: Final = frozenset({"key", "state", "seq", "prefix", "group", "duration_s", "message"})
COUNT_FIELDS: Final = frozenset({"prefix", "group", "seq", "states", "duration_n", "duration_s"})
FAILURE_FIELDS: Final = frozenset({"key", "seq", "prefix", "group", "message"})


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
        batch = self.batch
        return len(batch.events) + len(batch.counts) + len(batch.failures) + len(self.rejected)


class _EntryError(Exception):
    """An invalid entry."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail


def parse_request(body: object, reporter: str, seq: int) -> ParsedRequest:
    """Parse a request. `reporter` and `seq` are the defaults.

    Raises Invalid for a request without the documented form, and TooLarge for more than ENTRIES_MAX entries.
    """
    if not isinstance(body, dict):
        raise Invalid("expected an object with events, counts, failures or ended")
    if unknown := sorted(body.keys() - BODY_FIELDS):
        raise Invalid.at(unknown[0], msg=f"unknown field {_quoted(unknown[0])}")
    lists = {name: _list(body, name) for name in ("events", "counts", "failures")}
    if sum(map(len, lists.values())) > ENTRIES_MAX:
        raise TooLarge(f"at most {ENTRIES_MAX:,} entries in one request", most=ENTRIES_MAX)
    default = _default_seq(body, seq)
    rejected: list[Rejection] = []
    event_of = partial(_event, placed={})
    events, event_positions = _parse_list("events", lists["events"], event_of, default, rejected)
    counts, count_positions = _parse_list("counts", lists["counts"], _count, default, rejected)
    failures, failure_positions = _parse_list("failures", lists["failures"], _failure, default, rejected)
    ended_seq = None
    if _bool(body, "ended"):
        seqs = [*(event.seq for event in events), *(count.seq for count in counts), *(one.seq for one in failures)]
        ended_seq = max(seqs if seqs and body.get("seq") is None else [default, *seqs])
    batch = Batch(_reporter(body, reporter), tuple(events), tuple(counts), tuple(failures), ended_seq)
    positions: dict[EntryList, list[int]] = {
        "events": event_positions,
        "counts": count_positions,
        "failures": failure_positions,
    }
    return ParsedRequest(batch, _attempt(body), rejected, positions)


def _parse_list(
    name: EntryList, entries: list[Any], entry_of: Callable[[object, int], T], default: int, rejected: list[Rejection]
) -> tuple[list[T], list[int]]:
    """The valid entries of a list, and their indices. Others are added to `rejected`."""
    good: list[T] = []
    positions: list[int] = []
    for index, entry in enumerate(entries):
        try:
            good.append(entry_of(entry, default))
        except _EntryError as bad:
            rejected.append(_rejection(name, index, entry, bad))
        else:
            positions.append(index)
    return good, positions


def _event(entry: object, default: int, placed: dict[str, tuple[str, str]]) -> Event:
    """`placed`: prefix and group of the request's earlier tasks. A task keeps those of its first report."""
    fields = _checked(entry, EVENT_FIELDS)
    key = _key(fields)
    state = fields.get("state")
    known = ALIASES.get(state) if type(state) is str else None
    if known is None:
        raise _EntryError("unknown_state", f"{_quoted(state)} is not a state; valid: {', '.join(ALIASES)}")
    prefix, group = placed.setdefault(key, _prefix_and_group(fields, key))
    seconds = fields.get("duration_s")
    return Event(
        key,
        known,
        _seq(fields, default),
        prefix,
        group,
        None if seconds is None else _seconds(seconds),
        _message(fields) if "message" in fields else "",
    )


def _count(entry: object, default: int) -> Count:
    fields = _checked(entry, COUNT_FIELDS)
    prefix = _name(fields, "prefix")
    if not prefix:
        raise _EntryError("malformed", "prefix is missing")
    given = fields.get("states")
    if not isinstance(given, dict):
        raise _EntryError("malformed", "states must be an object with the number of tasks in each state")
    states: dict[TaskState, int] = {}
    for word, number in given.items():
        state = ALIASES.get(word)
        if state is None:
            raise _EntryError("unknown_state", f"{_quoted(word)} is not a state; valid: {', '.join(ALIASES)}")
        states[state] = states.get(state, 0) + _number(word, number)
    return Count(
        prefix,
        _name(fields, "group") or prefix,
        _seq(fields, default),
        states,
        _number("duration_n", fields.get("duration_n") or 0),
        _seconds(fields.get("duration_s") or 0),
    )


def _failure(entry: object, default: int) -> Failure:
    fields = _checked(entry, FAILURE_FIELDS)
    key = _key(fields)
    prefix, group = _prefix_and_group(fields, key)
    return Failure(key, prefix, group, _seq(fields, default), _message(fields))


def _checked(entry: object, fields: frozenset[str]) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise _EntryError("malformed", "an entry must be an object")
    if not entry.keys() <= fields:
        raise _EntryError("malformed", f"unknown field {_quoted(min(entry.keys() - fields))}")
    return entry


def _key(fields: Mapping[str, Any]) -> str:
    key = fields.get("key")
    if type(key) is not str or not key:
        raise _EntryError("bad_key", "key must be a non-empty string")
    if len(key) > KEY_MAX:
        raise _EntryError("bad_key", f"key must have at most {KEY_MAX} characters")
    if not _storable(key):
        raise _EntryError("bad_key", "key contains a character that cannot be stored")
    return key


def _prefix_and_group(fields: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Prefix and group: as given, else from the key. A given prefix is the default group."""
    prefix, group = _name(fields, "prefix"), _name(fields, "group")
    if prefix:
        return prefix, group or prefix
    from_key = split(key)
    return from_key.prefix, group or from_key.group


def _name(fields: Mapping[str, Any], which: str) -> str:
    """A prefix or group. Empty if it is not given."""
    name = fields.get(which)
    if name is None:
        return ""
    if type(name) is not str or len(name) > NAME_MAX or not _storable(name):
        raise _EntryError("bad_name", f"{which} must be a string of at most {NAME_MAX} storable characters")
    return name


def _seq(fields: Mapping[str, Any], default: int) -> int:
    seq = fields.get("seq")
    if seq is None:
        return default
    if type(seq) is not int or not 0 <= seq <= SEQ_MAX:
        raise _EntryError("bad_seq", f"seq must be an integer from 0 to {SEQ_MAX}")
    return seq


def _number(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise _EntryError("malformed", f"{name} must be an integer from 0 to {COUNT_MAX}")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= SECONDS_MAX:
        raise _EntryError("malformed", "duration_s must be a non-negative number of seconds")
    return float(value)


def _message(fields: Mapping[str, Any]) -> str:
    """The message of a failed task. Characters that cannot be stored become question marks."""
    message = fields.get("message")
    if message is None:
        return ""
    if type(message) is not str:
        raise _EntryError("malformed", "message must be a string")
    return message[:MESSAGE_MAX].encode("utf-8", "replace").decode().replace("\0", "?")


def _storable(text: str) -> bool:
    """Whether every database can store it: no NUL, no lone surrogate."""
    if text.isascii():
        return "\0" not in text
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    given = body.get(name)
    if given is None:
        return []
    if not isinstance(given, list):
        raise Invalid.at(name, msg="must be a list")
    return given


def _reporter(body: Mapping[str, Any], default: str) -> str:
    name = body.get("reporter")
    if name is None:
        return default[:REPORTER_MAX]
    if type(name) is not str or not 0 < len(name) <= REPORTER_MAX or not _storable(name):
        raise Invalid.at("reporter", msg=f"must be a name of 1 to {REPORTER_MAX} characters")
    return name


def _default_seq(body: Mapping[str, Any], default: int) -> int:
    try:
        return _seq(body, default)
    except _EntryError as bad:
        raise Invalid.at("seq", msg=bad.detail) from None


def _attempt(body: Mapping[str, Any]) -> int | None:
    attempt = body.get("attempt")
    if attempt is not None and (type(attempt) is not int or attempt < 1):
        raise Invalid.at("attempt", msg="must be an integer of at least 1")
    return attempt


def _bool(body: Mapping[str, Any], name: str) -> bool:
    given = body.get(name)
    if given is not None and type(given) is not bool:
        raise Invalid.at(name, msg="must be true or false")
    return bool(given)


def _rejection(name: EntryList, index: int, entry: object, bad: _EntryError) -> Rejection:
    """Include only the part of the entry's key that a response can contain."""
    key = entry.get("prefix" if name == "counts" else "key") if isinstance(entry, dict) else None
    shown = key[:KEY_MAX].encode("utf-8", "replace").decode() if type(key) is str else ""
    return Rejection(name, index, shown, bad.reason, bad.detail)


def _quoted(value: object) -> str:
    """A given value, shortened, in characters that every response can contain."""
    return ascii(value)[:60] if value is not None else "nothing"
