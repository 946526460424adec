"""The cloud as a WSGI application: rules for each call, then this cloud's own services or moto's."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from moto.backends import get_backend
from moto.core.base_backend import BackendDict
from moto.core.exceptions import ServiceException
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.sts.models import sts_backends
from werkzeug.serving import BaseWSGIServer, make_server

from standins.aws import ACCESS_KEY, SECRET_KEY, catalog, rules
from standins.aws.catalog import ACCOUNT
from standins.aws.compute import Capacity, Compute
from standins.aws.machines import Fleet
from standins.aws.pricing import SpotPrices, get_products
from standins.aws.quotas import Quotas
from standins.aws.wire import (
    AwsError,
    Call,
    Response,
    ec2_model,
    error_response,
    parse,
    response,
    signed_with,
)

LOGGED = 100_000


class Application:
    def __init__(self, home: Path, url: str) -> None:
        self.everything = False
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.fleet = Fleet(home, url)
        self.quotas, self.spot = Quotas(), SpotPrices()
        self.compute = Compute(self.fleet, self.quotas, self.spot)
        self.calls: deque[dict[str, Any]] = deque(maxlen=LOGGED)
        self.written = False
        """Whether moto has to forget something at the next reset."""
        self._as_new()

    def _as_new(self) -> None:
        fleet = self.fleet
        fleet.usual_times()
        self.rules = rules.Rules()
        self.secrets = {ACCESS_KEY: SECRET_KEY}
        self.disabled_regions: set[str] = set()
        self.quotas.values.clear()
        self.spot.fixed.clear()
        self.compute.capacity.clear()
        self.compute.tokens.clear()
        self.calls.clear()
        if self.everything:
            self.do_catalog(False)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        path = environ.get("PATH_INFO", "/")
        if path.startswith("/_control/"):
            answer = self.control(path.removeprefix("/_control/"), body)
        elif path.startswith("/_instance/"):
            answer = self.metadata(environ, path.removeprefix("/_instance/"))
        else:
            answer = self.aws(environ, body)
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body))), *answer.headers]
        start_response(f"{answer.status} {'OK' if answer.status < 300 else 'Error'}", headers)
        return [answer.body]

    def aws(self, environ: dict[str, Any], body: bytes) -> Response:
        call, began, at = parse(environ, body), time.monotonic(), time.time()
        time.sleep(self.rules.find("latency", call) or 0)
        try:
            self._known(call)
            self.rules.check(call)
            result = self.rules.answer(call) or self._dispatch(call)
            answer = response(call, result) if isinstance(result, dict) else result
        except AwsError as error:
            answer = error_response(call, error)
        except ServiceException as error:
            answer = error_response(call, AwsError(str(error.code), str(error.message)))
        except Exception as error:
            logging.exception("%s %s", call.service, call.action)
            answer = error_response(call, AwsError("InternalError", f"{type(error).__name__}: {error}", 500))
        self.calls.append(
            {
                "at": at, "ms": round((time.monotonic() - began) * 1000, 2), "service": call.service,
                "action": call.action, "region": call.region, "status": answer.status, "code": answer.code,
            }
        )  # fmt: skip
        return answer

    def _known(self, call: Call) -> None:
        secret = self.secrets.get(call.access_key)
        if secret is None:
            roles = sts_backends[ACCOUNT]["aws"].assumed_roles
            secret = next((r.secret_access_key for r in roles if r.access_key_id == call.access_key), None)
        if secret is None or call.region in self.disabled_regions:
            raise rules.unknown_key(call)
        if not signed_with(call, secret):
            raise rules.wrong_signature(call)

    def _dispatch(self, call: Call) -> Response | dict[str, Any]:
        match call.service, call.action:
            case "servicequotas", "ListServiceQuotas" | "GetServiceQuota":
                return self.quotas.answer(call)
            case "pricing", "GetProducts":
                return get_products(call)
            case "servicequotas" | "pricing", _:
                raise AwsError("UnknownOperationException", f"The cloud does not know {call.service}:{call.action}.")
            case "ec2", _ if not catalog.known(call.region):
                raise rules.unknown_key(call)
            case "ec2", _ if call.form.get("DryRun") == "true":
                raise AwsError("DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)
            case "ec2", _:
                return self._ec2(call)
            case "ssm", "GetParameter" | "GetParameters":
                return self._parameters(call)
        return self.onward(call)

    def _ec2(self, call: Call) -> Response | dict[str, Any]:
        match call.action:
            case "DescribeInstanceTypes":
                return self.compute.describe_instance_types(call)
            case "DescribeInstanceTypeOfferings":
                return self.compute.describe_instance_type_offerings(call)
            case "DescribeSpotPriceHistory":
                return self.spot.describe(call)
            case "DescribeRegions":
                return self.compute.describe_regions(call, self.disabled_regions)
            case "DescribeImages":
                with self.fleet.lock:
                    catalog.add_images(call.region)
            case "RunInstances":
                with self.fleet.lock:
                    return self.compute.run_instances(call, self.onward)
        return self.onward(call)

    def _parameters(self, call: Call) -> Response | dict[str, Any]:
        """Image parameters are this cloud's own; others are moto's."""
        names = call.data.get("Names") or [call.data.get("Name", "")]
        if not set(names) <= set(catalog.IMAGES):
            return self.onward(call)
        with self.fleet.lock:
            found = [
                {
                    "Name": name, "Type": "String", "Value": catalog.image(name, call.region),
                    "Version": 1, "DataType": "aws:ec2:image", "ARN": f"arn:aws:ssm:{call.region}::parameter{name}",
                }
                for name in names
            ]  # fmt: skip
        self.written = True
        return {"Parameter": found[0]} if call.action == "GetParameter" else {"Parameters": found}

    def onward(self, call: Call) -> Response:
        """moto's answer, one call at a time: it knows no locks."""
        self.written = True
        body = urlencode(call.form).encode() if call.form else call.body
        environ = {**call.environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        started: list[Any] = []
        with self.fleet.lock:
            chunks = b"".join(self.moto(environ, lambda status, headers, *_: started.extend([status, headers])))
        status, headers = int(started[0].split()[0]), dict(started[1])
        return Response(
            status, chunks, headers.get("Content-Type", "text/xml"), code=_code(chunks) if status >= 400 else ""
        )

    def metadata(self, environ: dict[str, Any], path: str) -> Response:
        instance_id, _, rest = path.partition("/")
        with self.fleet.lock:
            machine = self.fleet.machines.get(instance_id)
            if machine is None or machine.state not in {"running", "shutting-down", "stopping"}:
                return Response(404, b"Not Found", "text/plain")
            return machine.metadata(environ["REQUEST_METHOD"], rest, environ)

    def control(self, what: str, body: bytes) -> Response:
        act: Callable[..., Any] | None = getattr(self, f"do_{what}", None)
        if act is None:
            return Response(404, b'{"error": "no such control"}')
        try:
            return Response(200, json.dumps({"answer": act(**json.loads(body or b"{}"))}).encode())
        except (TypeError, ValueError, KeyError) as wrong:
            return Response(400, json.dumps({"error": f"{type(wrong).__name__}: {wrong}"}).encode())

    def do_reset(self) -> None:
        with self.fleet.lock:
            self.fleet.clear()
            self._as_new()
            if self.written:
                BackendDict.reset()
            self.written = False

    def do_rule(self, kind: str, service: str, action: str, region: str, **value: Any) -> None:
        self.rules.set(kind, service, action, region, **value)

    def do_lift(self, kind: str, service: str, action: str, region: str) -> None:
        self.rules.lift(kind, service, action, region)

    def do_credentials(self, keys: dict[str, str]) -> None:
        self.secrets = dict(keys)

    def do_region(self, name: str, enabled: bool) -> None:
        (self.disabled_regions.discard if enabled else self.disabled_regions.add)(name)

    def do_quota(self, code: str, value: float, region: str) -> None:
        self.quotas.values[region, code] = value

    def do_usage(self, region: str) -> dict[str, int]:
        with self.fleet.lock:
            return self.compute.usage(region)

    def do_image(self, region: str) -> str:
        with self.fleet.lock:
            self.written = True
            return catalog.image(catalog.DEFAULT_IMAGE, region)

    def do_capacity(self, instance_type: str, zone: str, market: str, left: int | None) -> None:
        with self.fleet.lock:
            rows = self.compute.capacity
            if left is None:
                lifted = Capacity(instance_type, zone, market, 0)
                rows[:] = [row for row in rows if not lifted.fits(row.instance_type, row.zone, row.market)]
                return
            where = (instance_type, zone, market)
            rows[:] = [row for row in rows if (row.instance_type, row.zone, row.market) != where]
            rows.append(Capacity(*where, left))

    def do_spot_price(self, instance_type: str, zone: str, price: float) -> None:
        self.spot.fixed[instance_type, zone] = (price, time.time())

    def do_times(self, boot_s: float | None, shutdown_s: float | None, grace_s: float | None) -> None:
        for name, value in (("boot_s", boot_s), ("shutdown_s", shutdown_s), ("grace_s", grace_s)):
            if value is not None:
                setattr(self.fleet, name, value)

    def do_catalog(self, everything: bool) -> int:
        with self.fleet.lock:
            catalog.stock(everything=everything)
            self.everything = everything
        return len(catalog.NAMES)

    def do_interrupt(self, instance_id: str, notice_s: float) -> None:
        with self.fleet.lock:
            self.fleet.machines[instance_id].interrupt(notice_s)

    def do_crash(self, instance_id: str) -> None:
        self.fleet.machines[instance_id].kill()

    def do_machines(self) -> list[dict[str, Any]]:
        with self.fleet.lock:
            return [machine.describe() for machine in self.fleet.machines.values()]

    def do_calls(self, service: str, action: str, region: str, since: float) -> list[dict[str, Any]]:
        wanted = {"service": service, "action": action, "region": region}
        return [
            call
            for call in list(self.calls)
            if call["at"] >= since and all(value in {"*", call[key]} for key, value in wanted.items())
        ]

    def do_forget_calls(self) -> None:
        self.calls.clear()


def _code(body: bytes) -> str:
    """The error code in an answer of moto's."""
    found = re.search(rb"<Code>([^<]+)|\"__type\": *\"([^\"]+)", body)
    return (found[1] or found[2]).decode() if found else "unknown"


class Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Calls are counted, not printed."""


def warm() -> None:
    """What the first calls would wait for: moto's backends and botocore's model of EC2."""
    ec2_model()
    for service in ("ec2", "sts", "ssm", "autoscaling", "elbv2"):  # the last two are called when an instance ends
        get_backend(service)


def serve(home: Path, ready: Callable[[str], None]) -> None:
    """Answer until the process is ended; all machines end with it."""
    home.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(home / "instances", ignore_errors=True)
    application: list[Application] = []
    server: BaseWSGIServer = make_server(
        "127.0.0.1", 0, lambda environ, start: application[0](environ, start), threaded=True, request_handler=Handler
    )
    url = f"http://127.0.0.1:{server.server_port}"
    application.append(Application(home, url))
    warm()
    ready(url)
    try:
        server.serve_forever()
    finally:
        for each in application:
            each.fleet.clear()
