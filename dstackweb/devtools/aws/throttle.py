"""What makes calls fail or wait: rules by service, action and region, where "*" stands for any."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dstackweb.devtools.aws.wire import Call, Refused

T = TypeVar("T")
USER = "arn:aws:iam::123456789012:user/dstackweb"
SIGNATURE = (
    "The request signature we calculated does not match the signature you provided. Check your AWS Secret Access Key "
    "and signing method. Consult the service documentation for details."
)


@dataclass
class Bucket:
    """`rate` calls a second, `burst` at once."""

    rate: float
    burst: float
    levels: dict[tuple[str, str, str], tuple[float, float]] = field(default_factory=dict)

    def take(self, key: tuple[str, str, str], now: float) -> bool:
        tokens, at = self.levels.get(key, (self.burst, now))
        tokens = min(self.burst, tokens + (now - at) * self.rate)
        ok = tokens >= 1
        self.levels[key] = (tokens - 1 if ok else tokens, now)
        return ok


@dataclass
class Fault:
    code: str
    message: str
    status: int
    times: int | None


class Rules(Generic[T]):
    """Values by pattern; the one set last that fits a call holds."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], T] = {}

    def set(self, service: str, action: str, region: str, value: T) -> None:
        self.rows.pop((service, action, region), None)
        self.rows[service, action, region] = value

    def clear(self, service: str, action: str, region: str) -> None:
        """Drops every rule that the pattern covers: three "*" drop all."""
        asked = (service, action, region)
        self.rows = {
            row: value
            for row, value in self.rows.items()
            if not all(a in {"*", b} for a, b in zip(asked, row, strict=True))
        }

    def fitting(self, call: Call) -> Iterator[T]:
        key = (call.service, call.action, call.region)
        for row, value in reversed(self.rows.items()):
            if all(a in {"*", b} for a, b in zip(row, key, strict=True)):
                yield value


class Weather:
    """All that can be set about how the cloud answers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buckets: Rules[Bucket] = Rules()
        self.denials: Rules[bool] = Rules()
        self.latencies: Rules[float] = Rules()
        self.faults: Rules[Fault] = Rules()
        self.secrets: dict[str, str] = {}
        self.disabled_regions: set[str] = set()

    def delay(self, call: Call) -> float:
        with self.lock:
            return next(self.latencies.fitting(call), 0.0)

    def check(self, call: Call) -> None:
        """Raises the error that this call gets by the rules."""
        with self.lock:
            bucket = next(self.buckets.fitting(call), None)
            if bucket and not bucket.take((call.service, call.action, call.region), time.monotonic()):
                raise throttled(call)
            if next(self.denials.fitting(call), False):
                raise denied(call)
            fault = next(self.faults.fitting(call), None)
            if fault and fault.times != 0:
                fault.times = fault.times and fault.times - 1
                raise Refused(fault.code, fault.message, fault.status)


def throttled(call: Call) -> Refused:
    if call.service == "ec2":
        return Refused("RequestLimitExceeded", "Request limit exceeded.", 503)
    if call.service == "servicequotas":
        return Refused("TooManyRequestsException", "Rate exceeded")
    return Refused("ThrottlingException" if call.json else "Throttling", "Rate exceeded")


def denied(call: Call) -> Refused:
    action = f"{call.service}:{call.action}"
    why = f"because no identity-based policy allows the {action} action"
    told = f"User: {USER} is not authorized to perform: {action} {why}"
    if call.service == "ec2":
        return Refused("UnauthorizedOperation", f"You are not authorized to perform this operation. {told}", 403)
    return Refused("AccessDeniedException", told) if call.json else Refused("AccessDenied", told, 403)


def unknown_key(call: Call) -> Refused:
    if call.service == "ec2":
        return Refused("AuthFailure", "AWS was not able to validate the provided access credentials", 401)
    told = "The security token included in the request is invalid."
    return Refused("UnrecognizedClientException", told) if call.json else Refused("InvalidClientTokenId", told, 403)


def wrong_signature(call: Call) -> Refused:
    if call.service == "ec2":
        return unknown_key(call)
    code = "InvalidSignatureException" if call.json else "SignatureDoesNotMatch"
    return Refused(code, SIGNATURE, 400 if call.json else 403)
