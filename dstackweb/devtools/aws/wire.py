"""How AWS speaks: a request taken apart, its signature checked, answers and errors in the layout of its protocol."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote
from xml.sax.saxutils import escape

JSON_SERVICES = {"servicequotas", "pricing", "ssm"}
EC2_XMLNS = "http://ec2.amazonaws.com/doc/2016-11-15/"


@dataclass
class Answer:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: list[tuple[str, str]] = field(default_factory=list)
    code: str = ""
    """AWS's error code, empty where it went well."""


class Refused(Exception):
    """An error as AWS names it."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


@dataclass
class Call:
    """A signed request, taken apart."""

    environ: Mapping[str, Any]
    body: bytes
    service: str
    region: str
    action: str
    access_key: str
    form: dict[str, str]
    """The parameters of EC2, STS and IAM, flat as they travel."""
    data: dict[str, Any]
    """The parameters of the JSON services."""

    @property
    def json(self) -> bool:
        return self.service in JSON_SERVICES

    def numbered(self, name: str) -> list[str]:
        """`Name.1`, `Name.2` … in order."""
        found = [(key.rpartition(".")[2], value) for key, value in self.form.items() if key.startswith(f"{name}.")]
        return [value for number, value in sorted((int(n), v) for n, v in found if n.isdigit())]

    def filters(self) -> dict[str, list[str]]:
        """EC2's `Filter.N.Name` and `Filter.N.Value.M`."""
        numbers = {key.split(".")[1] for key in self.form if key.startswith("Filter.")}
        return {
            self.form[f"Filter.{n}.Name"]: self.numbered(f"Filter.{n}.Value")
            for n in sorted(numbers)
            if f"Filter.{n}.Name" in self.form
        }


_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/(\d{8})/([^/,\s]+)/([^/,\s]+)/aws4_request")


def take_apart(environ: Mapping[str, Any], body: bytes) -> Call:
    """Routes by the credential scope of the Authorization header, as moto does."""
    scope = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    access_key, region, service = (scope[1], scope[3], scope[4].lower()) if scope else ("", "", "")
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    form: dict[str, str] = {}
    data: dict[str, Any] = {}
    if target:
        action = target.rpartition(".")[2]
        data = json.loads(body or b"{}")
    else:
        form = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
        action = form.get("Action", environ.get("REQUEST_METHOD", ""))
    return Call(environ, body, service, region, action, access_key, form, data)


def signed_with(call: Call, secret: str) -> bool:
    """Whether the request carries the signature (version 4) that `secret` gives it."""
    environ = call.environ
    header = environ["HTTP_AUTHORIZATION"]
    parts = dict(part.strip().split("=", 1) for part in header.partition(" ")[2].split(",") if "=" in part)
    _, date, region, service, _ = parts["Credential"].rsplit("/", 4)
    names = parts["SignedHeaders"].split(";")

    def value(name: str) -> str:
        key = name.upper().replace("-", "_")
        raw = environ.get(key if key in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{key}", "")
        return " ".join(str(raw).split())

    query = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in _query(environ))
    canonical = "\n".join(
        [
            environ["REQUEST_METHOD"],
            quote(environ.get("PATH_INFO") or "/", safe="/~"),
            "&".join(f"{k}={v}" for k, v in query),
            *(f"{name}:{value(name)}" for name in names),
            "",
            ";".join(names),
            environ.get("HTTP_X_AMZ_CONTENT_SHA256") or hashlib.sha256(call.body).hexdigest(),
        ]
    )
    to_sign = "\n".join(
        [
            "AWS4-HMAC-SHA256",
            environ.get("HTTP_X_AMZ_DATE", ""),
            f"{date}/{region}/{service}/aws4_request",
            hashlib.sha256(canonical.encode()).hexdigest(),
        ]
    )
    key = f"AWS4{secret}".encode()
    for part in (date, region, service, "aws4_request", to_sign):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.compare_digest(key.hex(), parts["Signature"])


def _query(environ: Mapping[str, Any]) -> list[tuple[str, str]]:
    return parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)


def error(call: Call, refused: Refused) -> Answer:
    request_id = str(uuid.uuid4())
    code, message = refused.code, refused.message
    headers = [("x-amzn-RequestId", request_id)]
    if call.json:
        data = json.dumps({"__type": code, "message": message}).encode()
        return Answer(refused.status, data, "application/x-amz-json-1.1", [*headers, ("x-amzn-ErrorType", code)], code)
    inner = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    if call.service == "ec2":
        body = f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>{request_id}</RequestID></Response>"
    else:
        body = (
            f"<ErrorResponse><Error><Type>Sender</Type>{inner}</Error>"
            f"<RequestId>{request_id}</RequestId></ErrorResponse>"
        )
    return Answer(refused.status, _xml(body), "text/xml;charset=UTF-8", headers, code)


def json_answer(value: Any) -> Answer:
    return Answer(200, json.dumps(value).encode(), "application/x-amz-json-1.1")


def ec2_answer(action: str, inner: str) -> Answer:
    request_id = str(uuid.uuid4())
    body = f'<{action}Response xmlns="{EC2_XMLNS}"><requestId>{request_id}</requestId>{inner}</{action}Response>'
    return Answer(200, _xml(body), "text/xml;charset=UTF-8")


def _xml(body: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()


def element(name: str, value: object) -> str:
    if isinstance(value, bool):
        value = str(value).lower()
    return f"<{name}>{escape(str(value))}</{name}>"


def shape_xml(shape: Any, value: Any, name: str) -> str:
    """A value as EC2 writes it, after its shape in botocore's own model of the service."""
    if shape.type_name == "structure":
        inner = "".join(
            shape_xml(member, value[key], member.serialization.get("name", key))
            for key, member in shape.members.items()
            if key in value
        )
        return f"<{name}>{inner}</{name}>"
    if shape.type_name == "list":
        item = shape.member.serialization.get("name", "item")
        return f"<{name}>{''.join(shape_xml(shape.member, each, item) for each in value)}</{name}>"
    return element(name, value)


def page(
    items: Iterable[Any], call: Call, *, size: int, token: str | None, invalid: Callable[[], Refused]
) -> tuple[list[Any], str]:
    """One page and the token of the next, empty on the last; the token only fits the same question."""
    question = {k: v for k, v in (call.data or call.form).items() if k not in {"NextToken", "ClientToken", "DryRun"}}
    digest = hashlib.sha256(json.dumps([call.service, call.region, question], sort_keys=True).encode()).hexdigest()[:16]
    start = 0
    if token:
        try:
            start, of = json.loads(base64.urlsafe_b64decode(token))
            if of != digest:
                raise ValueError(of)
        except ValueError:
            raise invalid() from None
    found: list[Any] = []
    for number, item in enumerate(items):
        if number >= start + size:
            return found, base64.urlsafe_b64encode(json.dumps([start + size, digest]).encode()).decode()
        if number >= start:
            found.append(item)
    return found, ""
