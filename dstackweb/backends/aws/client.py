"""Calls to AWS, within rate limits that all processes share; they wait, so never call it within a transaction. Import
it only to call AWS: boto3 takes 0.1 s and 24 MB, and 31 MB more with EC2's model."""

from __future__ import annotations

import base64
import datetime as dt
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import boto3
import botocore.loaders
import botocore.parsers
import botocore.session
from botocore import xform_name
from botocore.config import Config
from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError, PartialCredentialsError
from django.utils import timezone

from dstackweb.backends import api_calls
from dstackweb.backends.api_calls import Api
from dstackweb.backends.aws import config as settings, errors
from dstackweb.backends.aws.config import AwsConfig
from dstackweb.backends.aws.rate_limits import rate_of
from dstackweb.backends.contract import NonsenseAnswer, SourceFailed, SourceFailure, nonsense
from dstackweb.backends.kinds import is_tight
from dstackweb.backends.models import Backend
from dstackweb.lib.models import Bucket, Busy, Circuit, Open

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PAGES = 200
"""Of one call. The longest has a dozen."""


@dataclass(frozen=True)
class Patience:
    """botocore's retry mode and attempts, time-outs, and the longest wait for the rate limit."""

    mode: Literal["standard", "adaptive"]
    attempts: int
    connect_s: float
    read_s: float
    turn_s: float


BACKGROUND = Patience("adaptive", attempts=4, connect_s=5, read_s=30, turn_s=30)
PROBE = Patience("standard", attempts=1, connect_s=5, read_s=15, turn_s=5)
"""One try, to see whether an API still throttles."""
ONCE = Patience("standard", attempts=1, connect_s=5, read_s=60, turn_s=30)
"""For calls that are repeated elsewhere: botocore would retry four times without capacity."""


class Aws:
    """AWS with the settings of one backend. Threads may share it."""

    def __init__(
        self,
        config: AwsConfig,
        secret_access_key: str = "",
        *,
        patience: Patience = BACKGROUND,
        clock: Callable[[], dt.datetime] = timezone.now,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config, self._secret = config, secret_access_key
        self._patience, self._clock, self._sleep = patience, clock, sleep
        self._lock = threading.Lock()
        self._session: boto3.Session | None = None
        self._account = ""
        self._clients: dict[tuple[str, str, Patience], Any] = {}

    def call(
        self,
        service: str,
        region: str,
        operation: str,
        *,
        key: str = "",
        patience: Patience | None = None,
        **params: Any,
    ) -> dict[str, Any]:
        """The answer of one call, with a value under `key`. Raises SourceFailed, without a call if the API throttled
        lately."""
        self._sign_in_for(service, operation, region)
        api = f"{service}.{operation}"
        name = self._name(region, api)
        try:
            probing = Circuit.enter(name, self._clock())
        except Open as left_alone:
            raise _throttled(left_alone.until, api, region) from None
        try:
            client = self._client(service, region, PROBE if probing else patience or self._patience)
            answer: dict[str, Any] = getattr(client, xform_name(operation))(**params)
            if key and answer.get(key) is None:
                raise nonsense(f"{service}:{operation}", NonsenseAnswer.MISSING, region=region, key=key)
        except (BotoCoreError, ClientError) as error:
            if errors.is_throttle(error):
                until = Circuit.throttled(name, self._clock())
                raise _throttled(until, api, region) from error
            if probing:
                Circuit.failed(name)
            raise errors.explained(error, service, operation, region) from error
        except Unreadable as error:
            if probing:
                Circuit.failed(name)
            raise nonsense(f"{service}:{operation}", region=region, text=str(error)) from error
        except SourceFailed:
            if probing:
                Circuit.failed(name)
            raise
        if probing:
            Circuit.succeeded(name)
        return answer

    def items(
        self, service: str, region: str, operation: str, key: str, read: Callable[[Any], T], **params: Any
    ) -> Iterator[T]:
        """All items under `key` of a call's pages, as `read` makes them of botocore's values; each page is read on
        demand, with its own turn in the rate limit. Raises SourceFailed.

        What `read` fails on (`errors.ODD`) is left out, as unknown. If that is all there is, the answer is nonsense.
        """
        seen: set[str] = set()
        unreadable = readable = 0
        while len(seen) < MAX_PAGES:
            answer = self.call(service, region, operation, key=key, **params)
            for item in answer[key]:
                try:
                    value = read(item)
                except errors.ODD:
                    unreadable += 1
                    continue
                readable += 1
                yield value
            token = answer.get("NextToken")
            if not token:
                if unreadable and not readable:
                    raise nonsense(f"{service}:{operation}", NonsenseAnswer.ITEMS, region=region)
                if unreadable:
                    log.warning("%s %s %s: %d items can't be read", service, operation, region, unreadable)
                return
            if token in seen:
                break
            seen.add(token)
            params["NextToken"] = token
        raise nonsense(f"{service}:{operation}", NonsenseAnswer.PAGES, region=region)

    def regions_of(self, service: str, region: str) -> list[str]:
        """The regions of a service in a region's partition; no call. Raises SourceFailed."""
        session = self._sign_in_for(service, "endpoints", region)
        try:
            return session.get_available_regions(service, session.get_partition_for_region(region))
        except BotoCoreError as error:
            raise errors.explained(error, service, "endpoints", region) from error

    def _sign_in_for(self, service: str, operation: str, region: str) -> boto3.Session:
        try:
            return self._sign_in()
        except (BotoCoreError, ClientError) as error:
            raise errors.explained(error, service, operation, region) from error

    def _sign_in(self) -> boto3.Session:
        with self._lock:
            if self._session is None:
                self._session = self._open_session()
                self._account = _account(self._session, self.config.credentials.role_arn)
            return self._session

    def _open_session(self) -> boto3.Session:
        signing = self.config.credentials
        if signing.access_key_id and not self._secret:
            raise PartialCredentialsError(provider="config", cred_var="secret_access_key")
        session = boto3.Session(
            aws_access_key_id=signing.access_key_id,
            aws_secret_access_key=self._secret if signing.access_key_id else None,
            region_name=self.config.regions[0],
            botocore_session=_botocore_session(signing.profile),
        )
        if signing.role_arn is None:
            return session
        source = session.get_credentials()
        if source is None:
            return session
        region = self.config.regions[0]

        def assume_role() -> Any:
            try:
                return fetcher.fetch_credentials()
            except (Unreadable, *errors.ODD) as error:
                raise nonsense("sts:AssumeRole", region=region, text=str(error)) from error

        fetcher = AssumeRoleCredentialFetcher(
            client_creator=lambda service, **keys: self._make(session, service, region, PROBE, **keys),
            source_credentials=source,
            role_arn=signing.role_arn,
            extra_args={
                "RoleSessionName": "dstackweb",
                **({"ExternalId": signing.external_id} if signing.external_id else {}),
            },
        )
        assumed = _botocore_session(signing.profile)
        # botocore has no public way to set this: it does the same for the `role_arn` of profiles.
        own: Any = assumed
        own._credentials = DeferredRefreshableCredentials(refresh_using=assume_role, method="assume-role")
        return boto3.Session(botocore_session=assumed, region_name=region)

    def _client(self, service: str, region: str, patience: Patience) -> Any:
        """A client. Threads may share it, but not create one at the same time."""
        session = self._sign_in()
        with self._lock:
            client = self._clients.get((service, region, patience))
            if client is None:
                client = self._clients[service, region, patience] = self._make(session, service, region, patience)
            return client

    def _make(self, session: boto3.Session, service: str, region: str, patience: Patience, **credentials: Any) -> Any:
        how = Config(
            retries={"mode": patience.mode, "total_max_attempts": patience.attempts},
            connect_timeout=patience.connect_s,
            read_timeout=patience.read_s,
            user_agent_extra="dstackweb",
        )
        make: Any = session.client
        client = make(service, region_name=region, endpoint_url=self.config.endpoint_url, config=how, **credentials)
        client.meta.events.unregister("before-send", unique_id=_SIGN_IN)
        client.meta.events.register("before-send", partial(self._wait_turn, region, patience))
        return client

    def _wait_turn(self, region: str, patience: Patience, event_name: str, request: Any, **_: Any) -> None:
        """Wait for a turn before each HTTP request, also retries, and count it."""
        api = event_name.partition(".")[2]
        rate = rate_of(api)
        try:
            wait_s, left = Bucket.take(self._name(region, api), rate.per_s, rate.burst, patience.turn_s)
        except Busy as busy:
            until = self._clock() + dt.timedelta(seconds=busy.wait_s)
            raise _throttled(until, api, region, by="limiter") from None
        if wait_s:
            self._sleep(wait_s)
        _count_request(region, api, request, tight=int(is_tight(left, rate.burst)))

    def _name(self, region: str, api: str) -> str:
        return f"aws:{self._account}:{region}:{api}"


_models = botocore.loaders.create_loader()
"""The services' descriptions, read once for all sessions: EC2's take 0.1 s and tens of megabytes."""


class Unreadable(Exception):
    """An answer isn't in the format of its protocol."""


class _CheckedParser:
    """A mixin for botocore's parsers.

    They raise anything on an answer that can't be read, ResponseParserError and AttributeError among them, also because
    of a single value in it. Here such a value is None, and an answer without any structure is Unreadable.
    """

    def parse(self, response: Any, shape: Any) -> Any:
        parents: Any = super()
        try:
            parsed = parents.parse(response, shape)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise Unreadable(text or type(error).__name__) from error
        if not isinstance(parsed, dict):
            raise Unreadable
        return parsed

    def _parse_shape(self, shape: Any, node: Any) -> Any:
        parents: Any = super()
        if shape.type_name in _NESTED and isinstance(node, _SCALARS):
            return None
        try:
            return parents._parse_shape(shape, node)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
            return None


_NESTED, _SCALARS = {"structure", "list", "map"}, (str, int, float)


class _CheckedParsers(botocore.parsers.ResponseParserFactory):
    def create_parser(self, protocol_name: str) -> Any:
        plain: type = type(super().create_parser(protocol_name))
        return type(f"Checked{plain.__name__}", (_CheckedParser, plain), {})()


_SIGN_IN = "dstackweb-sign-in"


def _count_request(region: str, api: str, request: Any, *, tight: int = 0) -> None:
    header = request.headers.get("amz-sdk-request", b"")
    attempt = _ATTEMPT.search(header if isinstance(header, bytes) else header.encode())
    is_retry = attempt is not None and int(attempt[1]) > 1
    api_calls.add(Api("aws", api, region), requests=1, retries=int(is_retry), tight=tight)


def _count_sign_in(event_name: str, request: Any, **_: Any) -> None:
    """Count a request that botocore makes by itself, such as for a profile with a role."""
    scope = _SCOPE.search(str(request.headers.get("Authorization", "")))
    _count_request(scope[1] if scope else "", event_name.partition(".")[2], request)


_ATTEMPT = re.compile(rb"attempt=(\d+)")
_SCOPE = re.compile(r"Credential=[^/]+/\d+/([^/]+)/")


def _count_answer(
    event_name: str,
    parsed_response: dict[str, Any] | None,
    exception: Exception | None,
    context: dict[str, Any],
    **_: Any,
) -> None:
    """Count a request that failed or was throttled."""
    code = (parsed_response or {}).get("Error", {}).get("Code", "")
    if isinstance(exception, SourceFailed) or (not code and exception is None) or code == "DryRunOperation":
        return
    is_throttle = code in errors.THROTTLED
    api = Api("aws", event_name.partition(".")[2], context["client_region"])
    api_calls.add(api, throttles=int(is_throttle), failures=int(not is_throttle))


def _botocore_session(profile: str | None) -> botocore.session.Session:
    session = botocore.session.Session(profile=profile)
    count_sign_in: Any = _count_sign_in
    count_answer: Any = _count_answer
    session.register("before-send", count_sign_in, unique_id=_SIGN_IN)
    session.register("response-received", count_answer)
    session.register_component("data_loader", _models)
    session.register_component("response_parser_factory", _CheckedParsers())
    return session


_kept: dict[int, tuple[int, Aws]] = {}
_keeping = threading.Lock()


def aws_of(backend: Backend) -> Aws:
    """This process's client for the backend's current version. Raises Invalid, DomainError."""
    with _keeping:
        version, aws = _kept.get(backend.pk, (None, None))
        if aws is None or version != backend.version:
            config = settings.read(backend.config)
            key_id = config.credentials.access_key_id
            aws = Aws(config, settings.secret_of(key_id, backend.secret) if key_id else "")
            _kept[backend.pk] = backend.version, aws
        return aws


def forget(backend: Backend) -> None:
    """Sign in again next time: the source of the credentials, such as a file, may have changed."""
    with _keeping:
        _kept.pop(backend.pk, None)


def _throttled(until: dt.datetime, api: str, region: str, by: str = "aws") -> SourceFailed:
    return SourceFailed(
        SourceFailure.THROTTLED, until=until.isoformat(), api=api.replace(".", ":"), region=region, by=by
    )


def _account(session: boto3.Session, role_arn: str | None) -> str:
    """The account's number, or else the access key's ID: it separates the accounts' rate limits. No call.

    An access key's ID contains the account's number in bits 7 to 46 after its prefix, so temporary keys of an account
    share their limits.
    """
    if role_arn is not None:
        return role_arn.split(":")[4]
    credentials = session.get_credentials()
    if credentials is None:
        return ""
    if account := getattr(credentials, "account_id", None):
        return str(account)
    key_id = credentials.access_key or ""
    try:
        number = int.from_bytes(base64.b32decode(key_id[4:])[:6], "big")
    except ValueError:
        return key_id
    return f"{(number & 0x7FFFFFFFFF80) >> 7:012d}"
