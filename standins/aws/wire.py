"""AWS's protocols: requests parsed and authenticated, pages, and responses as botocore's models define them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

import botocore.session
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

JSON_SERVICES = {"servicequotas", "pricing", "ssm"}
_PAGES = {
    "ec2": (5, "InvalidParameterValue", "InvalidNextToken"),
    "pricing": (1, "InvalidParameterException", "InvalidNextTokenException"),
    "servicequotas": (1, "IllegalArgumentException", "InvalidPaginationTokenException"),
}
"""The fewest results of a page, and the errors for a bad MaxResults and a bad NextToken."""


@dataclass
class Response:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: list[tuple[str, str]] = field(default_factory=list)
    code: str = ""
    """AWS's error code, empty on success."""


class AwsError(Exception):
    """An error under AWS's name for it."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


@dataclass
class Call:
    """A signed request."""

    environ: Mapping[str, Any]
    body: bytes
    service: str
    region: str
    action: str
    access_key: str
    form: dict[str, str]
    """The parameters of EC2, STS and IAM, flat as they are sent."""
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


def parse(environ: Mapping[str, Any], body: bytes) -> Call:
    """The service is that of the Authorization header's credential scope, as in moto."""
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
    parts = dict(re.findall(r"(SignedHeaders|Signature)=([^,\s]+)", environ["HTTP_AUTHORIZATION"]))

    def value(name: str) -> str:
        key = name.upper().replace("-", "_")
        return str(environ.get(key if key in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{key}", ""))

    request = AWSRequest(
        environ["REQUEST_METHOD"],
        f"http://cloud{environ.get('PATH_INFO') or '/'}?{environ.get('QUERY_STRING', '')}",
        {name: value(name) for name in parts["SignedHeaders"].split(";")},
        call.body,
    )
    request.context["timestamp"] = environ["HTTP_X_AMZ_DATE"]
    auth = SigV4Auth(Credentials(call.access_key, secret), call.service, call.region)
    expected = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    return hmac.compare_digest(expected, parts["Signature"])


def error_response(call: Call, error: AwsError) -> Response:
    request_id = str(uuid.uuid4())
    code, message = error.code, error.message
    headers = [("x-amzn-RequestId", request_id)]
    if call.json:
        data = json.dumps({"__type": code, "message": message}).encode()
        return Response(error.status, data, "application/x-amz-json-1.1", [*headers, ("x-amzn-ErrorType", code)], code)
    inner = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    if call.service == "ec2":
        body = f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>{request_id}</RequestID></Response>"
    else:
        body = (
            f"<ErrorResponse><Error><Type>Sender</Type>{inner}</Error>"
            f"<RequestId>{request_id}</RequestId></ErrorResponse>"
        )
    return Response(error.status, body.encode(), "text/xml;charset=UTF-8", headers, code)


@cache
def ec2_model() -> Any:
    return botocore.session.get_session().get_service_model("ec2")


def response(call: Call, result: dict[str, Any]) -> Response:
    """The result of an operation of EC2 or of a JSON service."""
    if call.json:
        return Response(200, json.dumps(result).encode(), "application/x-amz-json-1.1")
    name, shape = f"{call.action}Response", ec2_model().operation_model(call.action).output_shape
    body = f"<{name}><requestId>{uuid.uuid4()}</requestId>{_members(shape, result)}</{name}>"
    return Response(200, body.encode(), "text/xml;charset=UTF-8")


class Xml(str):
    """An element that is not rendered again."""


def xml(shape: Any, value: Any, name: str) -> Xml:
    """A value as EC2 writes it, by its shape in botocore's model."""
    if isinstance(value, Xml):
        return value
    if shape.type_name == "structure":
        inner = _members(shape, value)
    elif shape.type_name == "list":
        item = shape.member.serialization.get("name", "item")
        inner = "".join(xml(shape.member, each, item) for each in value)
    else:
        inner = str(value).lower() if isinstance(value, bool) else escape(str(value))
    return Xml(f"<{name}>{inner}</{name}>")


def _members(shape: Any, value: dict[str, Any]) -> str:
    return "".join(
        xml(member, value[key], member.serialization.get("name", key))
        for key, member in shape.members.items()
        if key in value
    )


def page(items: Iterable[Any], call: Call, most: int = 100) -> tuple[list[Any], dict[str, str]]:
    """One page, and the NextToken of the next if there is one; a token is valid for the same question only."""
    given = call.data or call.form
    fewest, bad_size, bad_token = _PAGES[call.service]
    size = int(given.get("MaxResults") or most)
    if not fewest <= size <= most:
        raise AwsError(bad_size, f"MaxResults must be {fewest} to {most}")
    question = {key: value for key, value in given.items() if key not in {"NextToken", "ClientToken", "DryRun"}}
    digest = hashlib.sha256(json.dumps([call.service, call.region, question], sort_keys=True).encode()).hexdigest()[:16]
    start = 0
    if token := given.get("NextToken"):
        try:
            start, of = json.loads(base64.urlsafe_b64decode(token))
        except ValueError:
            of = ""
        if of != digest:
            raise AwsError(bad_token, "The token is not valid for this request.")
    found = list(islice(items, start, start + size + 1))
    if len(found) <= size:
        return found, {}
    return found[:size], {"NextToken": base64.urlsafe_b64encode(json.dumps([start + size, digest]).encode()).decode()}
