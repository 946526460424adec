"""Rules by which calls fail or wait; "*" stands for any service, action or region."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from standins.aws.wire import AwsError, Call, Response

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


@dataclass
class Answers:
    """Raw bodies that are sent in turn, whatever the call asks for. `{n}` in a body is the answer's number."""

    bodies: list[str]
    status: int
    charset: str
    times: int | None
    sent: int = 0

    def next(self, call: Call) -> Response | None:
        if self.times is not None and self.sent >= self.times:
            return None
        body = self.bodies[self.sent % len(self.bodies)].replace("{n}", str(self.sent))
        self.sent += 1
        content_type = "application/x-amz-json-1.1" if call.json else "text/xml;charset=UTF-8"
        return Response(self.status, body.encode(self.charset), content_type)


KINDS: dict[str, Callable[..., Any]] = {
    "throttle": Bucket, "fail": Fault, "answer": Answers, "deny": lambda: True, "latency": lambda seconds: seconds,
}  # fmt: skip


class Rules:
    """Rules by kind, service, action and region. Of those of a kind that fit a call, the latest applies."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: dict[tuple[str, ...], Any] = {}

    def set(self, kind: str, *pattern: str, **value: Any) -> None:
        with self.lock:
            self.rows.pop((kind, *pattern), None)
            self.rows[(kind, *pattern)] = KINDS[kind](**value)

    def lift(self, *pattern: str) -> None:
        """Remove every rule that the pattern, kind first, covers."""
        with self.lock:
            self.rows = {row: value for row, value in self.rows.items() if not _covers(pattern, row)}

    def find(self, kind: str, call: Call) -> Any:
        wanted = (kind, call.service, call.action, call.region)
        return next((value for row, value in reversed(self.rows.items()) if _covers(row, wanted)), None)

    def check(self, call: Call) -> None:
        """Raises the error that this call gets by the rules."""
        with self.lock:
            bucket = self.find("throttle", call)
            if bucket and not bucket.take((call.service, call.action, call.region), time.monotonic()):
                raise throttled(call)
            if self.find("deny", call):
                raise denied(call)
            fault = self.find("fail", call)
            if fault and fault.times != 0:
                fault.times = fault.times and fault.times - 1
                raise AwsError(fault.code, fault.message, fault.status)

    def answer(self, call: Call) -> Response | None:
        """The raw answer that this call gets by the rules; None: the usual one."""
        with self.lock:
            answers = self.find("answer", call)
            return answers.next(call) if answers else None


def _covers(pattern: tuple[str, ...], row: tuple[str, ...]) -> bool:
    return all(one in {"*", other} for one, other in zip(pattern, row, strict=True))


def throttled(call: Call) -> AwsError:
    if call.service == "ec2":
        return AwsError("RequestLimitExceeded", "Request limit exceeded.", 503)
    if call.service == "servicequotas":
        return AwsError("TooManyRequestsException", "Rate exceeded")
    return AwsError("ThrottlingException" if call.json else "Throttling", "Rate exceeded")


def denied(call: Call) -> AwsError:
    action = f"{call.service}:{call.action}"
    why = f"because no identity-based policy allows the {action} action"
    message = f"User: {USER} is not authorized to perform: {action} {why}"
    if call.service == "ec2":
        return AwsError("UnauthorizedOperation", f"You are not authorized to perform this operation. {message}", 403)
    return AwsError("AccessDeniedException", message) if call.json else AwsError("AccessDenied", message, 403)


def unknown_key(call: Call) -> AwsError:
    if call.service == "ec2":
        return AwsError("AuthFailure", "AWS was not able to validate the provided access credentials", 401)
    message = "The security token included in the request is invalid."
    return (
        AwsError("UnrecognizedClientException", message)
        if call.json
        else AwsError("InvalidClientTokenId", message, 403)
    )


def wrong_signature(call: Call) -> AwsError:
    if call.service == "ec2":
        return unknown_key(call)
    code = "InvalidSignatureException" if call.json else "SignatureDoesNotMatch"
    return AwsError(code, SIGNATURE, 400 if call.json else 403)
