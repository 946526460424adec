"""Calls of Ray's dashboard, which serves the Jobs API and the state of the cluster, and its answers as plain data."""

from __future__ import annotations

import datetime as dt
import email.utils
import functools
import json
import math
import re
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dstackweb.backends import api_calls
from dstackweb.backends.api_calls import Api
from dstackweb.backends.clusters import EngineRefused, unreachable
from dstackweb.backends.contract import (
    CloudInstance,
    InstanceEnd,
    InstanceState,
    SourceFailed,
    SourceFailure,
    nonsense,
)

if TYPE_CHECKING:
    import httpx

CONNECT_S, READ_S, TOTAL_S = 5.0, 20.0, 40.0
ANSWER_MAX = 64 << 20
"""Bytes: the list of jobs has all that Ray keeps."""
DENIED, THROTTLED, NOT_FOUND, AWAY = (401, 403), 429, 404, (502, 503, 504)

MODEL = "accelerator_type:"
"""The resource that names a node's GPUs; a node has one of it, and a job takes a thousandth."""
MODEL_SHARE = 0.001
MIB = 1 << 20
NEW_S = 1.0
"""How much older than a snapshot of the cluster a job has to be to be counted in it."""
DYING_S = 5.0
"""How long the agent of a dead supervisor may take to end its job: it looks every half second."""
DEPLOYMENT, SIZE, SCRIPT = "dstackweb", "dstackweb_size", "dstackweb_script"
"""Keys of a job's metadata."""
LOST = "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"
DIED = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_START_FAILURE", LOST)
"""Failures of the process that watches over a job's command, not of the command."""

ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)
"""Exceptions from reading an answer that is not as expected; times that no calendar has raise OSError."""

_ID_OF_JOB = re.compile(r"(?<=api/jobs/)[^/]+")

Resources = Mapping[str, float]


class CallFailed(EngineRefused):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """`value` is the JSON, None for 404; `at` the time by the head's clock, in seconds since 1970."""

    value: Any
    at: float


@dataclass(frozen=True)
class Dashboard:
    """`address` is its URL. Redirects are not followed, and no proxy of the environment is used."""

    address: str
    token: str = field(default="", repr=False)
    ca_file: str = ""

    def call(self, method: str, path: str, body: Any = None) -> Answer:
        """Raises CallFailed, or SourceFailed where nothing was decided."""
        import httpx  # late: it is a tenth of the time in which a process starts

        # Nothing packed: a few KB of it can become gigabytes, more than once.
        headers = {"Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        api = f"{method} {_ID_OF_JOB.sub('ID', path.partition('?')[0])}"
        timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
        verify = _trust(self.ca_file) if self.address.startswith("https:") else False
        try:
            with (
                api_calls.request(Api("ray", api, urlsplit(self.address).netloc)),
                httpx.Client(verify=verify, timeout=timeout, headers=headers, trust_env=False) as client,
                client.stream(method, f"{self.address}/{path}", json=body) as response,
            ):
                return self._read(response, _content(response))
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise unreachable(self.address, str(error) or type(error).__name__) from error

    def _read(self, response: httpx.Response, content: bytes) -> Answer:
        status = response.status_code
        said = content[-20_000:].decode(errors="replace").strip().splitlines()
        # A traceback's last line says what is wrong, or is a dot.
        text = next((line.strip() for line in reversed(said) if len(line.strip()) > 1), f"HTTP {status}")[:300]
        if status in DENIED:
            raise SourceFailed(SourceFailure.ACCESS_DENIED, endpoint=self.address, text=text)
        if status == THROTTLED:
            raise SourceFailed(SourceFailure.THROTTLED, api="Ray", endpoint=self.address)
        if status in AWAY:
            raise unreachable(self.address, text)
        at = _time(response.headers.get("Date", ""))
        if status == NOT_FOUND:
            return Answer(None, at)
        if not response.is_success:
            raise CallFailed(status, text)
        try:
            return Answer(json.loads(content, parse_float=_finite, parse_constant=_finite), at)
        except (ValueError, RecursionError) as error:
            raise nonsense(self.address, text=f"no JSON: {text}") from error


def _content(response: httpx.Response) -> bytes:
    """The answer, unless it is too long or takes too long."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise SourceFailed(SourceFailure.SERVICE_ERROR, text="a packed answer, which no one asked for")
    until, found = time.monotonic() + TOTAL_S, bytearray()
    for part in response.iter_raw():
        found += part
        if len(found) > ANSWER_MAX:
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=f"an answer of more than {ANSWER_MAX >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError("the answer takes too long")
    return bytes(found)


@functools.lru_cache(8)
def _trust(ca_file: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file or None)


def _finite(text: str) -> float:
    """Python reads `NaN`, `Infinity` and `1e999` too. Raises ValueError."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no number")
    return number


def _time(date: str) -> float:
    """Of the header, or by this machine's clock without one that can be understood."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return time.time()


@dataclass(frozen=True)
class Node:
    """A living node: what it has of each resource by Ray's names, and what of it is free. Memory is in bytes."""

    total: dict[str, float]
    free: dict[str, float]
    gpu: str = ""
    """The model of its GPUs, if Ray knows it."""

    def fits(self, size: Resources, *, empty: bool = False) -> int:
        """How many jobs of this size fit: now, or when the node is `empty`."""
        there = self.total if empty else self.free
        return max(0, min(int((there.get(name, 0.0) + 1e-6) // amount) for name, amount in size.items()))

    def take(self, size: Resources, sign: int = 1) -> Node:
        """The node with this less free; more with the sign -1."""
        free = {name: self.free.get(name, 0.0) - sign * size.get(name, 0.0) for name in self.total}
        return replace(self, free={name: max(0.0, min(amount, self.total[name])) for name, amount in free.items()})


@dataclass(frozen=True)
class Cluster:
    """`is_counted`: whether Ray says how much of its nodes is used; else only our own jobs are counted."""

    nodes: dict[str, Node] = field(default_factory=dict)
    is_counted: bool = True

    def __bool__(self) -> bool:
        """Whether it has nodes: an empty answer counts only once it repeats."""
        return bool(self.nodes)


@dataclass(frozen=True)
class Job:
    """A job of some deployment of ours. Times are seconds since 1970 by the clock of Ray's head."""

    name: str
    deployment: str
    status: str
    submitted: float
    ended: float | None
    node: str
    address: str
    error: str
    message: str
    size: dict[str, float]

    @property
    def is_over(self) -> bool:
        """Whether its status is one of Ray's last ones."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")

    @property
    def died(self) -> bool:
        """Whether its supervisor ended without a word about the command, as with its node."""
        return self.status == "FAILED" and self.error in DIED and bool(self.node)


def size(cpus: int, memory_mib: int, model: str, gpus: int, more: Resources) -> dict[str, float]:
    """What a job of an order takes, by Ray's names."""
    found = {**more, "CPU": float(max(cpus, 1)), "memory": float(memory_mib * MIB), "GPU": float(gpus)}
    if gpus and model:
        found[MODEL + model] = MODEL_SHARE
    return {name: amount for name, amount in found.items() if amount > 0}


def cluster(nodes: Any, status: Any, jobs: Iterable[Job]) -> Cluster:
    """Parse the cluster from `/api/v0/nodes`, `/api/cluster_status` and our own jobs. Raises one of ODD.

    A node that can't be read is left out, unless that is all of them. Ray writes down what is used every five seconds:
    jobs that were started or have ended since then are counted here.
    """
    by_id: dict[str, Node] = {}
    failed: Exception | None = None
    for node in nodes["data"]["result"]["result"]:
        try:
            if node["state"] == "ALIVE":
                total = {str(name): float(amount) for name, amount in node["resources_total"].items()}
                by_id[str(node["node_id"])] = Node(total, dict(total), _model(total))
        except ODD as error:
            failed = error
    if failed is not None and not by_id:
        raise failed
    shown = status["data"]["clusterStatus"]
    used = shown["loadMetricsReport"]["usageByNode"] if shown else None
    for id, node in list(by_id.items()):
        usage = (used or {}).get(id) or {}
        try:
            by_id[id] = node.take({name: float(usage[key][0]) for name in node.total if (key := _camel(name)) in usage})
        except ODD:
            del by_id[id]
    _correct(by_id, float(shown["time"]) if used is not None else None, jobs)
    return Cluster(by_id, used is not None)


def _correct(nodes: dict[str, Node], at: float | None, jobs: Iterable[Job]) -> None:
    """Count our jobs that a snapshot of that time does not have yet, or has still; without one all that live."""
    for job in jobs:
        is_counted = at is not None and job.submitted <= at - NEW_S
        if job.is_over:
            sign = -1 if at is not None and is_counted and (job.ended or 0.0) > at else 0
        else:
            sign = 0 if is_counted else 1
        where = job.node or next((id for id, node in nodes.items() if job.size and node.fits(job.size)), "")
        if sign and where in nodes:
            nodes[where] = nodes[where].take(job.size, sign)


def jobs(answer: Any, deployment: str = "") -> Iterator[Job]:
    """The jobs of `/api/jobs/` of a deployment of ours, or of all; others' are left out. Raises as `cluster`.

    Of all deployments, those that can't be read are left out; of one deployment none may be, since who is missing has
    ended.
    """
    if not isinstance(answer, list):
        raise TypeError("no list of jobs")  # nothing has ended because of that
    for shown in answer:
        if not isinstance(shown, dict):
            raise TypeError("a job that is none")
        marks = shown.get("metadata")
        if not shown.get("submission_id") or not isinstance(marks, dict) or DEPLOYMENT not in marks:
            continue
        if deployment and marks[DEPLOYMENT] != deployment:
            continue
        try:
            yield job(shown)
        except ODD:
            if deployment:
                raise


def job(shown: Any) -> Job:
    """One job as the API shows it. Raises as `cluster`."""
    marks = shown.get("metadata") or {}
    ended = shown.get("end_time")
    return Job(
        name=str(shown["submission_id"]),
        deployment=str(marks.get(DEPLOYMENT, "")),
        status=str(shown["status"]),
        submitted=float(shown["start_time"]) / 1000,
        ended=float(ended) / 1000 if ended else None,
        node=str(shown.get("driver_node_id") or ""),
        address=urlsplit(shown.get("driver_agent_http_address") or "").hostname or "",
        error=str(shown.get("error_type") or ""),
        message=" ".join(str(shown.get("message") or "").split())[:300],
        size=_size(marks.get(SIZE)),
    )


def _size(text: Any) -> dict[str, float]:
    """Anyone who uses the cluster can write metadata: what is no size takes nothing."""
    try:
        found = {str(name): float(amount) for name, amount in json.loads(text or "{}").items()}
    except (TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
        return {}
    return found if all(math.isfinite(amount) and amount > 0 for amount in found.values()) else {}


def instance(found: Job, region: str, now: float) -> CloudInstance:
    """A job in our words; `now` is the time of the head's clock. Raises as `cluster`, ArithmeticError, OSError."""
    state, why = _state(found, now)
    at = dt.datetime.fromtimestamp(found.submitted, dt.UTC)
    text = f"Ray: {found.message}" if found.message and (why or state is InstanceState.STARTING) else ""
    return CloudInstance(found.name, found.name, region, state, "", found.address, at, why, text)


def _state(found: Job, now: float) -> tuple[InstanceState, str]:
    if found.status == "PENDING":
        return InstanceState.STARTING, ""
    if not found.is_over:
        return InstanceState.RUNNING, ""
    if found.died:
        is_dying = found.ended is not None and now - found.ended < DYING_S
        return InstanceState.ENDING if is_dying else InstanceState.GONE, InstanceEnd.INTERRUPTED
    return InstanceState.GONE, InstanceEnd.CLOUD


def models(nodes: Iterable[Node]) -> Sequence[str]:
    """The models of GPUs that there are; `` for those without a name."""
    return sorted({node.gpu for node in nodes if node.total.get("GPU")})


def _model(total: Resources) -> str:
    return next((name.removeprefix(MODEL) for name in sorted(total) if name.startswith(MODEL)), "")


def _camel(name: str) -> str:
    """A resource's name as the dashboard writes it where it is a key."""
    first, *others = name.split("_")
    return first + "".join(part.title() for part in others)
