"""What a request tells of tasks, from JSON to plain data. One bad entry costs itself alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from dstackweb.lib.errors import Invalid, TooLarge
from dstackweb.progress.events import Batch, Count, Event, Failure, Where
from dstackweb.progress.models import KEY_MAX, NAME_MAX
from dstackweb.progress.prefixes import split
from dstackweb.progress.states import ALIASES, TaskState

ENTRIES_MAX = 5000
REPORTER_MAX = 100
MESSAGE_MAX = 2000
SEQ_MAX = 2**53
"""What every JSON reader holds exactly."""
COUNT_MAX = 10**12
SECONDS_MAX = 1e12

T = TypeVar("T")

BODY_FIELDS: Final = frozenset({"reporter", "seq", "events", "counts", "failures", "ended", "attempt"})
EVENT_FIELDS: Final = frozenset({"key", "state", "seq", "prefix", "group", "duration_s", "message"})
COUNT_FIELDS: Final = frozenset({"prefix", "group", "seq", "states", "duration_n", "duration_s"})
FAILURE_FIELDS: Final = frozenset({"key", "seq", "prefix", "group", "message"})


@dataclass(frozen=True, slots=True)
class Refused:
    """An entry that was not taken: the list that it stands in, its place there, why (a code), and what is wrong."""

    list: Where
    index: int
    key: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Told:
    """What a request tells. `places` says for each list of the batch where its entries stood in the request."""

    batch: Batch
    attempt: int | None
    refused: list[Refused]
    places: dict[Where, list[int]]

    @property
    def entries(self) -> int:
        """All that were read, good or bad."""
        batch = self.batch
        return len(batch.events) + len(batch.counts) + len(batch.failures) + len(self.refused)


class _Bad(Exception):
    """This entry can't be taken."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail


def read(body: object, reporter: str, seq: int) -> Told:
    """Understand a request. `reporter` and `seq` are for one that doesn't name them.

    Raises Invalid where it has not the documented form as a whole, and TooLarge for more than ENTRIES_MAX entries.
    """
    if not isinstance(body, dict):
        raise Invalid("an object with events, counts, failures or ended is expected")
    if unknown := sorted(body.keys() - BODY_FIELDS):
        raise Invalid.at(unknown[0], msg=f"there is no field {_quoted(unknown[0])}")
    lists = {name: _list(body, name) for name in ("events", "counts", "failures")}
    if sum(map(len, lists.values())) > ENTRIES_MAX:
        raise TooLarge(f"at most {ENTRIES_MAX:,} entries in one request", most=ENTRIES_MAX)
    default = _whole_seq(body, seq)
    refused: list[Refused] = []
    event_of = partial(_event, placed={})
    events, of_events = _read("events", lists["events"], event_of, default, refused)
    counts, of_counts = _read("counts", lists["counts"], _count, default, refused)
    failures, of_failures = _read("failures", lists["failures"], _failure, default, refused)
    ended_seq = None
    if _flag(body, "ended"):
        said = [*(event.seq for event in events), *(count.seq for count in counts), *(one.seq for one in failures)]
        ended_seq = max(said if said and body.get("seq") is None else [default, *said])
    batch = Batch(_reporter(body, reporter), tuple(events), tuple(counts), tuple(failures), ended_seq)
    places: dict[Where, list[int]] = {"events": of_events, "counts": of_counts, "failures": of_failures}
    return Told(batch, _attempt(body), refused, places)


def _read(
    name: Where, entries: list[Any], entry_of: Callable[[object, int], T], default: int, refused: list[Refused]
) -> tuple[list[T], list[int]]:
    """The good entries of a list, and where in it they stood; the others are added to `refused`."""
    good: list[T] = []
    places: list[int] = []
    for index, entry in enumerate(entries):
        try:
            good.append(entry_of(entry, default))
        except _Bad as bad:
            refused.append(_refused(name, index, entry, bad))
        else:
            places.append(index)
    return good, places


def _event(entry: object, default: int, placed: dict[str, tuple[str, str]]) -> Event:
    """`placed`: where the tasks are that the request told of before. A task stays where it was told of first."""
    told = _entry(entry, EVENT_FIELDS)
    key = _key(told)
    state = told.get("state")
    known = ALIASES.get(state) if type(state) is str else None
    if known is None:
        raise _Bad("unknown_state", f"{_quoted(state)} is no state; known are {', '.join(ALIASES)}")
    prefix, group = placed.setdefault(key, _place(told, key))
    seconds = told.get("duration_s")
    return Event(
        key,
        known,
        _seq(told, default),
        prefix,
        group,
        None if seconds is None else _seconds(seconds),
        _message(told) if "message" in told else "",
    )


def _count(entry: object, default: int) -> Count:
    told = _entry(entry, COUNT_FIELDS)
    prefix = _name(told, "prefix")
    if not prefix:
        raise _Bad("malformed", "prefix is missing")
    given = told.get("states")
    if not isinstance(given, dict):
        raise _Bad("malformed", "states has to be an object: how many tasks are in each state")
    states: dict[TaskState, int] = {}
    for word, number in given.items():
        state = ALIASES.get(word)
        if state is None:
            raise _Bad("unknown_state", f"{_quoted(word)} is no state; known are {', '.join(ALIASES)}")
        states[state] = states.get(state, 0) + _number(word, number)
    return Count(
        prefix,
        _name(told, "group") or prefix,
        _seq(told, default),
        states,
        _number("duration_n", told.get("duration_n") or 0),
        _seconds(told.get("duration_s") or 0),
    )


def _failure(entry: object, default: int) -> Failure:
    told = _entry(entry, FAILURE_FIELDS)
    key = _key(told)
    prefix, group = _place(told, key)
    return Failure(key, prefix, group, _seq(told, default), _message(told))


def _entry(entry: object, fields: frozenset[str]) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise _Bad("malformed", "an entry is an object")
    if not entry.keys() <= fields:
        raise _Bad("malformed", f"there is no field {_quoted(min(entry.keys() - fields))}")
    return entry


def _key(told: Mapping[str, Any]) -> str:
    key = told.get("key")
    if type(key) is not str or not key:
        raise _Bad("bad_key", "key has to be a text, and not empty")
    if len(key) > KEY_MAX:
        raise _Bad("bad_key", f"a key has at most {KEY_MAX} characters")
    if not _storable(key):
        raise _Bad("bad_key", "the key has a character that can't be stored")
    return key


def _place(told: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Prefix and group: as told, else by the key. A prefix that is told by itself is the group, too."""
    prefix, group = _name(told, "prefix"), _name(told, "group")
    if prefix:
        return prefix, group or prefix
    by_key = split(key)
    return by_key.prefix, group or by_key.group


def _name(told: Mapping[str, Any], which: str) -> str:
    """A prefix or a group; empty where it isn't told."""
    name = told.get(which)
    if name is None:
        return ""
    if type(name) is not str or len(name) > NAME_MAX or not _storable(name):
        raise _Bad("bad_name", f"{which} has to be a text of at most {NAME_MAX} characters that can be stored")
    return name


def _seq(told: Mapping[str, Any], default: int) -> int:
    seq = told.get("seq")
    if seq is None:
        return default
    if type(seq) is not int or not 0 <= seq <= SEQ_MAX:
        raise _Bad("bad_seq", f"seq has to be a whole number from 0 to {SEQ_MAX}")
    return seq


def _number(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise _Bad("malformed", f"{name} has to be a whole number from 0 to {COUNT_MAX}")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= SECONDS_MAX:
        raise _Bad("malformed", "duration_s has to be a number of seconds, and not negative")
    return float(value)


def _message(told: Mapping[str, Any]) -> str:
    """What a failed task said; what no database holds becomes a question mark."""
    message = told.get("message")
    if message is None:
        return ""
    if type(message) is not str:
        raise _Bad("malformed", "message has to be a text")
    return message[:MESSAGE_MAX].encode("utf-8", "replace").decode().replace("\0", "?")


def _storable(text: str) -> bool:
    """Whether every database holds it: no NUL, and no half of a character."""
    if text.isascii():
        return "\0" not in text
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    given = body.get(name)
    if given is None:
        return []
    if not isinstance(given, list):
        raise Invalid.at(name, msg="a list is expected")
    return given


def _reporter(body: Mapping[str, Any], default: str) -> str:
    name = body.get("reporter")
    if name is None:
        return default[:REPORTER_MAX]
    if type(name) is not str or not 0 < len(name) <= REPORTER_MAX or not _storable(name):
        raise Invalid.at("reporter", msg=f"a name of 1 to {REPORTER_MAX} characters is expected")
    return name


def _whole_seq(body: Mapping[str, Any], default: int) -> int:
    try:
        return _seq(body, default)
    except _Bad as bad:
        raise Invalid.at("seq", msg=bad.detail) from None


def _attempt(body: Mapping[str, Any]) -> int | None:
    attempt = body.get("attempt")
    if attempt is not None and (type(attempt) is not int or attempt < 1):
        raise Invalid.at("attempt", msg="a whole number from 1 is expected")
    return attempt


def _flag(body: Mapping[str, Any], name: str) -> bool:
    given = body.get(name)
    if given is not None and type(given) is not bool:
        raise Invalid.at(name, msg="true or false is expected")
    return bool(given)


def _refused(name: Where, index: int, entry: object, bad: _Bad) -> Refused:
    """Quote of the entry only what an answer may hold."""
    key = entry.get("prefix" if name == "counts" else "key") if isinstance(entry, dict) else None
    told = key[:KEY_MAX].encode("utf-8", "replace").decode() if type(key) is str else ""
    return Refused(name, index, told, bad.reason, bad.detail)


def _quoted(value: object) -> str:
    """What was given, short, and such as every answer can hold."""
    return ascii(value)[:60] if value is not None else "nothing"
