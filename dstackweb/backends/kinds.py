"""The base class of backend kinds (docs/writing-a-backend.md): settings, form, words, health checks and prices. A kind
is an entry point of the group `dstackweb.backends`: nothing outside its own package knows its name."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from django.utils.dateparse import parse_datetime
from django.utils.functional import Promise
from django.utils.translation import gettext as _, ngettext
from pydantic import SecretStr, ValidationError

from dstackweb.backends.contract import NonsenseAnswer, SourceFailure
from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.lib.secrets import decrypt, encrypt
from dstackweb.spec.fields import Keys
from dstackweb.spec.source import Source
from dstackweb.spec.wording import field_errors

if TYPE_CHECKING:
    from dstackweb.backends.contract import Backend as Driver, Sourced
    from dstackweb.backends.forms import BackendForm
    from dstackweb.backends.models import Backend

ENTRY_POINTS = "dstackweb.backends"
PLACE = ""
"""Stored with secrets: the address that they are for (`Kind.secrets_are_for`)."""

K = TypeVar("K", bound=Keys)


class HealthLine(NamedTuple):
    """One line of the health page. `tone` is `go`, `info`, `wait` or `bad`; `hint` says what to do.

    `host` is the name of the host that it is about, if there is one.
    """

    name: str
    tone: str
    value: str
    hint: str = ""
    at: dt.datetime | None = None
    host: str = ""


@dataclass(frozen=True)
class ApiUsage:
    """How much of its rate limit one cloud API uses in one region; of several accounts, the busiest one.

    `left` of `burst` calls may be made at once; below zero it is how many calls wait. Until `open_until` the API is
    not called, because it throttled.
    """

    api: str
    region: str
    left: float
    burst: float
    open_until: dt.datetime | None = None

    @property
    def is_tight(self) -> bool:
        return is_tight(self.left, self.burst)


def is_tight(left: float, burst: float) -> bool:
    """Whether at most a fifth of the calls that may be made at once is left, or a single one."""
    return left <= max(1.0, burst / 5)


class QuotaFamily(NamedTuple):
    """Instance types that share quotas: the quotas' codes, empty if there is none."""

    label: str
    on_demand: str
    spot: str


@dataclass(frozen=True)
class ReportLine:
    """One line of a connection test: `found` is the result, `fix` what to do; `mark` is its symbol."""

    title: str
    state: str
    mark: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class ReportPart:
    """The lines of one region, or those of the backend as a whole."""

    title: str
    lines: tuple[ReportLine, ...]
    state: str


class Snippet(NamedTuple):
    """Text to copy, such as a policy."""

    title: str
    text: str
    intro: str = ""
    open: bool = False


@dataclass(frozen=True)
class ConnectionReport:
    """What a connection test found. `state` is the worst of its parts: `ok`, `skipped`, `warning` or `failed`."""

    state: str
    summary: str
    parts: tuple[ReportPart, ...]
    snippets: tuple[Snippet, ...] = ()


class NoSettings(Keys):
    """A kind without settings."""


class Kind:
    """A kind of backend. Subclass it, set `driver_class`, and override what differs.

    Settings are described by `schema`, a `spec.fields.Keys` model with flat fields. Fields of type SecretStr are stored
    encrypted, apart from the rest, and never shown again; one that is left out keeps its stored value, and an empty one
    removes it.
    """

    name: ClassVar[str]
    """As in `Backend.kind` and the API's `type`; the entry point has the same name."""
    label: ClassVar[str | Promise] = ""
    """The display name; `name` if empty."""
    driver_class: type[Any]
    """Called with the `Backend` row; gives a `contract.Backend` or `contract.Sourced`."""
    schema: ClassVar[type[Keys]] = NoSettings
    costs_money = True
    """Paid backends need a run or profile that names them, and count against the project's budget."""
    secrets_are_for: ClassVar[str] = ""
    """The setting with the address that secrets are sent to: stored ones are not sent to another."""
    is_machine = True
    """Its instances are machines. False: allocations of a cluster, each made for one job and ended with it."""
    is_hosts = False
    """Its capacity is the registered hosts, which the scheduler places on by itself."""
    can_test = False
    """Whether `test_connection` does anything."""
    setup_hint: ClassVar[str | Promise] = ""
    """Shown above the form of a new backend."""

    def projects(self, config: Mapping[str, Any]) -> Sequence[str] | None:
        """The projects that may use a backend whose jobs all belong to one user; None: each job has a machine."""
        return None

    def cluster(self, config: Mapping[str, Any]) -> str:
        """Identify the cluster of these settings: backends of this kind with the same one count each other's orders.

        Empty: each backend has its own.
        """
        return ""

    def driver(self, backend: Backend) -> Driver | Sourced:
        """The driver of a configured backend. Raises Invalid if its settings are invalid."""
        code: Driver | Sourced = self.driver_class(backend)
        return code

    def read(self, config: Mapping[str, Any]) -> Keys:
        """The settings, checked. Raises Invalid, each error with its place."""
        return validated(self.schema, config)

    def settle(self, config: Mapping[str, Any], stored: str = "") -> tuple[dict[str, Any], str]:
        """The config to store, and its encrypted secrets; `stored` are the former ones. Raises Invalid."""
        names, kept = self.secret_names(), self.secrets_of(stored)
        given = {name: config.get(name, kept.get(name)) for name in names}
        secrets = {name: value for name, value in given.items() if value not in (None, "")}
        plain = {name: value for name, value in config.items() if name not in names}
        self.read({**plain, **secrets})
        place = str(plain.get(self.secrets_are_for, "")).rstrip("/")
        if kept.get(PLACE, place) != place and (reused := [name for name in secrets if name not in config]):
            msg = _("`%(name)s` was stored for %(place)s: enter it again for the new address, or remove it")
            raise Invalid.at(reused[0], msg=msg % {"name": reused[0], "place": kept[PLACE]})
        if not secrets:
            return plain, ""
        return plain, encrypt(json.dumps({**secrets, **({PLACE: place} if self.secrets_are_for else {})}))

    def secret_names(self) -> tuple[str, ...]:
        """The fields of `schema` that hold secrets."""
        return tuple(name for name, field in self.schema.model_fields.items() if SecretStr in _types(field.annotation))

    @staticmethod
    def secrets_of(stored: str) -> dict[str, str]:
        """Decrypted secrets by name; empty if they can't be decrypted with this server's key."""
        try:
            return {str(name): str(value) for name, value in json.loads(decrypt(stored)).items()} if stored else {}
        except DomainError:
            return {}

    def form(self) -> type[BackendForm]:
        from dstackweb.backends.forms import schema_form

        return schema_form(self)

    def location(self, config: Mapping[str, Any]) -> str:
        return "–"

    def runs_images(self, config: Mapping[str, Any]) -> bool:
        """Whether its instances run jobs in containers. Its offers for an image say so as well."""
        return False

    def source_failure(self, error: Mapping[str, Any]) -> str:
        """Why a source or the backend could not be read, and what to do; empty for unknown codes.

        A kind words its own codes, and leaves those of `SourceFailure` to this.
        """
        data = {"region": "", "api": "", "text": "", "endpoint": "", "action": "", **error}
        match error.get("code"):
            case SourceFailure.ACCESS_DENIED:
                return _("Access denied in %(region)s: %(action)s is not allowed.") % data
            case SourceFailure.THROTTLED:
                if data.get("by") == "limiter":
                    text = _("Rate limit of %(api)s in %(region)s reached; this call is waiting.") % data
                else:
                    text = _("%(api)s is throttled in %(region)s.") % data
                until = parse_datetime(str(data.get("until", "")))
                return f"{text} " + _("Retry at %s UTC.") % f"{until:%H:%M:%S}" if until else text
            case SourceFailure.UNREACHABLE:
                text = _("%(endpoint)s is unreachable") % data
                hint = _("Check the region name, the endpoint URL and the network.")
                return text + _(": ") + f"{str(data['text']).rstrip('. ')}. {hint}"
            case SourceFailure.SERVICE_ERROR:
                text = _("%(api)s failed in %(region)s: %(text)s") if data["api"] else _("Failed: %(text)s")
                return text % data
            case SourceFailure.NONSENSE:
                text = _("Unreadable answer from %(api)s in %(region)s: %(what)s.")
                if not data["region"]:
                    text = _("Unreadable answer from %(api)s: %(what)s.")
                return text % {**data, "what": _nonsense(data)} + " " + _("The last known values stay in use.")
            case SourceFailure.EMPTIED:
                return _("The answer is empty, and the last one was not. The last values stay in use until it repeats.")
            case SourceFailure.NOT_READ:
                return _("Not read yet.")
            case SourceFailure.NO_ANSWER:
                since = parse_datetime(str(data.get("since", "")))
                text = _("No answer yet in %(region)s") % data if data["region"] else _("No answer yet")
                return text + (" " + _("since %s UTC.") % f"{since:%H:%M:%S}" if since else ".")
        return ""

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        """What limits an offer, with its numbers (`Offer.detail`); empty for unknown codes."""
        vcpus = _("%(used)d of %(limit)d vCPUs in use, %(needs)d needed.")
        match detail.get("code"):
            case "quota":
                fits = int(detail["fits"])
                return ngettext("Fits %d more", "Fits %d more", fits) % fits + _(": ") + vcpus % detail
            case "no_quota":
                return _("No quota: ") + vcpus % detail
            case "quota_unknown":
                why = str(detail.get("why", ""))
                reasons: dict[str, str] = {
                    SourceFailure.ACCESS_DENIED: _("access denied"),
                    SourceFailure.NOT_READ: _("not read yet"),
                    SourceFailure.NO_ANSWER: _("no answer"),
                    SourceFailure.THROTTLED: _("throttled"),
                    SourceFailure.NONSENSE: _("unreadable answer"),
                }
                return _("Quota unknown: %s.") % reasons.get(why, why)
        return ""

    def wait_reason(self, code: str) -> str:
        """What its engine waits for before it starts an instance (`CloudInstance.waits`); empty for unknown codes."""
        return ""

    def quota_families(self) -> Sequence[QuotaFamily]:
        """The quotas that the quotas page shows, in its order."""
        return ()

    def quota_name(self, code: str) -> str:
        """A quota's name in the cloud's console, or its code."""
        return code

    def test_connection(self, config: Mapping[str, Any], secret: str) -> ConnectionReport:
        """Try all the backend's calls without changing anything. Uses the network, outside transactions."""
        raise NotImplementedError(f"{self.name} has no connection test")

    def health(self, backends: Sequence[Backend], now: dt.datetime) -> Iterable[HealthLine]:
        """Lines for the health page, besides the sources. Reads rows only."""
        return ()

    def api_usage(self, now: dt.datetime) -> Sequence[ApiUsage]:
        """The use of each API's rate limit, for /metrics and the health page. Reads rows only."""
        return ()


def _nonsense(data: Mapping[str, Any]) -> str:
    """Word what is wrong with an answer, as a clause."""
    match data.get("what"):
        case NonsenseAnswer.MISSING:
            return _("`%s` is missing") % str(data.get("key", ""))
        case NonsenseAnswer.ITEMS:
            return _("no item can be read")
        case NonsenseAnswer.PAGES:
            return _("its pages have no end")
    return str(data.get("text", "")).rstrip(".") or _("not in the expected format")


def validated(schema: type[K], config: Mapping[str, Any]) -> K:
    """Settings as their schema. Raises Invalid, each error with its place."""
    try:
        return schema.model_validate(dict(config))
    except ValidationError as error:
        errors = field_errors(error, schema, Source(dict(config)))
        raise Invalid(errors[0]["msg"], errors) from None


def _types(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ()) or (annotation,)
