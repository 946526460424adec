"""What Ray's dashboard answers, read as data. The answers are of Ray 2.60."""

from __future__ import annotations

import copy
import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.backends import registry, services
from dstackweb.backends.contract import (
    Availability,
    InstanceEnd,
    InstanceOrder,
    InstanceState,
    LaunchFailed,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceReading,
    SourceState,
)
from dstackweb.backends.matching import meets
from dstackweb.backends.ray import dashboard
from dstackweb.backends.ray.dashboard import CallFailed, Cluster, Dashboard
from dstackweb.lib.errors import Invalid
from dstackweb.offers import store
from dstackweb.spec.effective import Requirements

AT = 1795487535.0
"""When Ray wrote down what is used."""
A100, CPUS, DEAD = "9d52", "ab12", "cd34"


def node(id: str, state: str = "ALIVE", **more: float) -> dict[str, Any]:
    """One of `/api/v0/nodes`."""
    total = {"CPU": 8.0, "memory": 32e9, "object_store_memory": 8e7, "node:192.0.2.2": 1.0, **more}
    return {"node_id": id, "node_ip": "192.0.2.2", "is_head_node": id == CPUS, "state": state, "resources_total": total}


GPUS = {"GPU": 4.0, "accelerator_type:A100": 1.0, "my_batch": 2.0}
NODES = {"result": True, "data": {"result": {"total": 3, "result": [
    node(A100, **GPUS), node(CPUS), node(DEAD, "DEAD", GPU=8.0)]}}}  # fmt: skip
STATUS = {"result": True, "data": {"autoscalingError": None, "clusterStatus": {"time": AT, "loadMetricsReport": {
    "resourceDemand": [[{"GPU": 9.0}, 1]],
    "usageByNode": {
        A100: {"CPU": [3.0, 8.0], "memory": [524288000.0, 32e9], "GPU": [1.0, 4.0], "myBatch": [1.0, 2.0],
               "acceleratorType:A100": [0.001, 1.0], "objectStoreMemory": [0.0, 8e7]},
        CPUS: {"CPU": [0.0, 8.0], "memory": [0.0, 32e9]}}}}}}  # fmt: skip
NO_STATUS = {"result": True, "data": {"autoscalingStatus": None, "autoscalingError": None, "clusterStatus": None}}
"""Of a head that has just started, or has the second autoscaler."""


def shown(name: str, status: str = "RUNNING", deployment: str = "mine", **more: Any) -> dict[str, Any]:
    """One of `/api/jobs/`."""
    over = status in ("SUCCEEDED", "FAILED", "STOPPED")
    return {
        "type": "SUBMISSION", "job_id": None, "submission_id": name, "driver_info": None, "status": status,
        "entrypoint": "true", "message": f"Job is\n{status}.", "error_type": None,
        "start_time": int(AT * 1000) - 60_000,
        "end_time": int(AT * 1000) - 30_000 if over else None,
        "metadata": {"dstackweb": deployment, "dstackweb_size": '{"CPU": 2.0, "GPU": 1.0}'}, "runtime_env": None,
        "driver_agent_http_address": "http://192.0.2.2:52365", "driver_node_id": A100, "driver_exit_code": None,
    } | more  # fmt: skip


def read(*jobs: dict[str, Any], status: Any = STATUS) -> Cluster:
    return dashboard.cluster(NODES, status, dashboard.jobs(list(jobs)))


def free(*jobs: dict[str, Any], status: Any = STATUS) -> tuple[float, float]:
    """Free CPUs and GPUs of the node with GPUs."""
    found = read(*jobs, status=status).nodes[A100].free
    return found["CPU"], found["GPU"]


def test_living_nodes_have_what_nobody_uses() -> None:
    found = read()
    assert set(found.nodes) == {A100, CPUS}
    gpus = found.nodes[A100]
    assert (gpus.gpu, gpus.free["CPU"], gpus.free["GPU"], gpus.free["my_batch"]) == ("A100", 5, 3, 1)
    assert gpus.free["accelerator_type:A100"] == pytest.approx(0.999)
    assert (found.nodes[CPUS].gpu, found.nodes[CPUS].free["CPU"], found.is_counted) == ("", 8, True)


def test_what_changed_since_ray_counted_is_counted_here() -> None:
    late = {"start_time": int(AT * 1000) + 200}
    assert free(shown("before")) == (5, 3), "it is in Ray's own count"
    assert free(shown("after", **late)) == (3, 2)
    assert free(shown("waits", "PENDING", driver_node_id=None, **late)) == (3, 2)
    assert free(shown("ended", "SUCCEEDED")) == (5, 3)
    assert free(shown("ended since", "STOPPED", end_time=int(AT * 1000) + 200)) == (7, 4)
    assert free(shown("came and went", "FAILED", end_time=int(AT * 1000) + 400, **late)) == (5, 3)
    assert free(*[shown(f"many-{i}", **late) for i in range(9)]) == (0, 0), "never below nothing"


def test_without_rays_count_only_our_own_jobs_are_counted() -> None:
    assert free(shown("a"), shown("b", deployment="theirs"), shown("c", "FAILED"), status=NO_STATUS) == (4, 2)
    assert not read(status=NO_STATUS).is_counted


@pytest.mark.parametrize(
    ("asked", "fits"),
    [((1, 1000, "", 0), 13), ((8, 0, "", 0), 1), ((1, 20000, "", 0), 2), ((1, 0, "A100", 1), 3), ((1, 0, "A100", 2), 1),
     ((1, 0, "L4", 1), 0), ((6, 0, "A100", 1), 0), ((0, 0, "", 0), 13)],
)  # fmt: skip
def test_what_fits_is_what_the_nodes_have_left(asked: tuple[int, int, str, int], fits: int) -> None:
    assert sum(node.fits(dashboard.size(*asked, {})) for node in read().nodes.values()) == fits


@pytest.fixture
def backend(db: Any) -> Any:
    config = {"projects": ["main"], "address": "http://127.0.0.1:8265", "gpu_memory": ["A100=80GB"]}
    return services.put("cluster", "ray", config)[0]


def offers(backend: Any, found: Cluster, image: str | None = None, **needs: Any) -> list[Any]:
    driver: Any = registry.driver(backend)
    value = store.checked(found, driver.sources["nodes"].type)
    reading = SourceReading(SourceState.FRESH, value, timezone.now())
    made: list[Any] = driver.join({SourceKey("nodes", ""): reading}, Requirements(**needs), image=image)
    return made


def test_offers_are_what_a_node_needs_of_nodes_that_could_ever_give_it(backend: Any) -> None:
    [a100] = offers(backend, read(), gpu_count_min=1, cpu_min=2, memory_min_mib=8000)
    assert (a100.gpu_name, a100.gpu_memory_mib, a100.cpus, a100.memory_mib) == ("A100", 81920, 2, 8000)
    assert (a100.instance_type, a100.availability, a100.detail["fits"], a100.price) == ("gpu:A100", "available", 2, 0)
    assert meets(a100, Requirements(gpu_count_min=1, gpu_names=("A100",), gpu_memory_min_mib=80000))
    [busy] = offers(backend, read(), gpu_count_min=4)
    assert busy.availability is Availability.BUSY
    assert offers(backend, read(), gpu_count_min=5) == offers(backend, read(), cpu_min=9) == []
    [unknown] = offers(backend, read(status=NO_STATUS))
    assert unknown.availability is Availability.UNKNOWN
    [image] = offers(backend, read(), image="busybox")
    assert image.availability is Availability.NOT_AVAILABLE


def test_custom_resources_of_the_settings_keep_runs_on_nodes_that_have_them(db: Any) -> None:
    batch, _is_new = services.put(
        "batch", "ray", {"projects": ["main"], "address": "http://127.0.0.1:8265", "resources": ["my_batch=1"]}
    )
    [offer] = offers(batch, read())
    assert offer.detail["fits"] == 1
    other, _is_new = services.put(
        "other", "ray", {"projects": ["main"], "address": "http://127.0.0.1:8265", "resources": ["nowhere=1"]}
    )
    assert offers(other, read()) == []


def state(*args: Any, now: float = AT, **more: Any) -> tuple[InstanceState, str]:
    [found] = dashboard.jobs([shown("u-1", *args, **more)])
    made = dashboard.instance(found, "cluster", now)
    assert (made.instance, made.cloud_id, made.address) == ("u-1", "u-1", "192.0.2.2")
    return made.state, made.why


def test_jobs_of_others_are_left_out_and_states_are_said_in_our_words() -> None:
    driver = {"type": "DRIVER", "submission_id": None, "metadata": {}, "status": "RUNNING"}
    assert list(dashboard.jobs([driver, shown("x", metadata=None), shown("y", metadata={"job_name": "y"})])) == []
    assert state("PENDING") == (InstanceState.STARTING, "")
    assert state("RUNNING") == (InstanceState.RUNNING, "")
    assert state("SUCCEEDED") == state("STOPPED") == state("FAILED") == (InstanceState.GONE, InstanceEnd.CLOUD)
    died = {"error_type": "JOB_SUPERVISOR_ACTOR_DIED"}
    assert state("FAILED", **died) == (InstanceState.GONE, InstanceEnd.INTERRUPTED)
    assert state("FAILED", now=AT - 29, **died)[0] is InstanceState.ENDING, "its agent may be ending its job"
    never = {"error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "driver_node_id": None}
    assert state("FAILED", **never) == (InstanceState.GONE, InstanceEnd.CLOUD)
    assert state("A_NEW_STATUS") == (InstanceState.RUNNING, ""), "an unknown status ends nothing"


Answers = Callable[..., Dashboard]


@pytest.fixture
def answers() -> Iterator[Answers]:
    """A dashboard that gives one answer to all."""
    servers: list[HTTPServer] = []

    def make(status: int, body: bytes = b"", **headers: str) -> Dashboard:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = self.headers.get("Authorization") == "Bearer hush"
                self.send_response_only(status if allowed else 418)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return Dashboard(f"http://127.0.0.1:{servers[-1].server_address[1]}", "hush")

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, SourceFailure.ACCESS_DENIED), (403, SourceFailure.ACCESS_DENIED), (429, SourceFailure.THROTTLED),
     (502, SourceFailure.UNREACHABLE), (503, SourceFailure.UNREACHABLE), (504, SourceFailure.UNREACHABLE)],
)  # fmt: skip
def test_what_decides_nothing_is_no_refusal(answers: Answers, status: int, code: str) -> None:
    with pytest.raises(SourceFailed) as failed:
        answers(status).call("GET", "api/jobs/")
    assert failed.value.code == code


def test_a_refusal_says_the_last_line_and_redirects_are_not_followed(answers: Answers) -> None:
    with pytest.raises(CallFailed) as failed:
        answers(500, b"Traceback\n  File ...\nValueError: no such thing\n.\n").call("GET", "x")
    assert (failed.value.status, failed.value.text) == (500, "ValueError: no such thing")
    with pytest.raises(CallFailed):
        answers(302, Location="http://127.0.0.1:9/").call("GET", "x")
    assert answers(404).call("GET", "x").value is None


def test_the_time_is_the_heads(answers: Answers) -> None:
    assert answers(200, b"[]", Date="Tue, 24 Nov 2026 02:32:15 GMT").call("GET", "x").at == AT
    for odd in ({}, {"Date": "Tue, 99 Nov 2026 02:32:15 GMT"}, {"Date": "Tue, 24 Nov 99999999 02:32:15 GMT"}):
        assert answers(200, b"[]", **odd).call("GET", "x").at == pytest.approx(timezone.now().timestamp(), abs=60)


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"\xff", b"[" * 100_000, b"[1, 2", b"[NaN]", b"[-Infinity]", b"[1e999]"],
    ids=["html", "bytes", "deep", "cut", "nan", "infinity", "large"],
)
def test_what_is_no_json_is_a_failure_of_the_source(answers: Answers, body: bytes) -> None:
    with pytest.raises(SourceFailed):
        answers(200, body).call("GET", "x")


def test_a_long_answer_is_not_read_to_its_end(answers: Answers, monkeypatch: Any) -> None:
    monkeypatch.setattr(dashboard, "ANSWER_MAX", 1000)
    with pytest.raises(SourceFailed, match="MiB"):
        answers(200, b"[" + b"1," * 1000 + b"1]").call("GET", "x")


def test_a_packed_answer_is_not_unpacked(answers: Answers) -> None:
    """64 KB that were packed twice become 64 GB."""
    bomb = gzip.compress(gzip.compress(bytes(1 << 24)))
    with pytest.raises(SourceFailed, match="packed"):
        answers(200, bomb, **{"Content-Encoding": "gzip, gzip"}).call("GET", "x")


def _without(of: Any, *path: Any, put: Any = None) -> Any:
    """A copy in which one place has another value."""
    made = copy.deepcopy(of)
    at = made
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = put
    return made


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("nodes", "status", "jobs"),
    [(None, STATUS, []), ([], STATUS, []), ({"data": {}}, STATUS, []), (NODES, {}, []), (NODES, None, []),
     (_without(NODES, "data", "result", "result", put=[{}, 5, {"state": "ALIVE", "resources_total": {"CPU": "x"}}]),
      STATUS, []),
     (NODES, _without(STATUS, "data", "clusterStatus", "loadMetricsReport"), []),
     (NODES, STATUS, None), (NODES, STATUS, {}), (NODES, STATUS, [1])],
)  # fmt: skip
def test_odd_answers_are_failures_of_the_source(
    backend: Any, monkeypatch: Any, nodes: Any, status: Any, jobs: Any
) -> None:
    given = {"api/v0/nodes": nodes, "api/cluster_status": status, "api/jobs/": jobs}
    monkeypatch.setattr(
        Dashboard, "call", lambda _self, _method, path, _body=None: dashboard.Answer(given[path.split("?")[0]], AT)
    )
    driver: Any = registry.driver(backend)
    with pytest.raises(SourceFailed, match="nonsense"):
        driver.fetch(SourceKey("nodes", ""))


@pytest.mark.parametrize(
    ("nodes", "status", "left"),
    [(_without(NODES, "data", "result", "result", 0, "resources_total"), STATUS, {CPUS}),
     (_without(NODES, "data", "result", "result", 0, "resources_total", put={"CPU": "x"}), STATUS, {CPUS}),
     (NODES, _without(STATUS, "data", "clusterStatus", "loadMetricsReport", "usageByNode", A100, "CPU"), {CPUS})],
)  # fmt: skip
def test_a_node_that_makes_no_sense_is_left_out(nodes: Any, status: Any, left: set[str]) -> None:
    assert set(dashboard.cluster(nodes, status, []).nodes) == left


def test_a_job_that_makes_no_sense_is_left_out_of_what_is_used() -> None:
    odd = [shown("x", start_time=None), shown("x", start_time=10**400)]
    assert [job.name for job in dashboard.jobs([*odd, shown("y")])] == ["y"]


def test_a_job_of_another_deployment_that_makes_no_sense_hides_none_of_ours() -> None:
    odd = [shown("x", deployment="theirs", start_time=None), shown("z", metadata="dstackweb")]
    assert [job.name for job in dashboard.jobs([*odd, shown("y")], "mine")] == ["y"]


def test_a_cluster_without_nodes_is_empty() -> None:
    assert (bool(Cluster()), bool(read())) == (False, True)


@pytest.mark.parametrize("moment", [10**400, 10**20, -(10**20), "x"], ids=["huge", "large", "negative", "text"])
def test_a_job_with_an_odd_time_is_a_failure_of_the_source(
    backend: Any, monkeypatch: Any, settings: Any, moment: Any
) -> None:
    settings.DSTACKWEB_SHARED_UID = True  # where the tests are not root, a launch is refused before it asks
    odd = shown("x", start_time=moment)
    monkeypatch.setattr(
        Dashboard, "call", lambda _self, _method, path: dashboard.Answer([odd] if path == "api/jobs/" else odd, AT)
    )
    with pytest.raises(SourceFailed):
        registry.cloud(backend).instances("cluster", "mine")
    with pytest.raises(SourceFailed):
        registry.cloud(backend).launch(InstanceOrder("x", "mine", "cluster", "cpu", False, "#!/bin/sh"))


@pytest.mark.parametrize(
    "size", ["{", "[]", "[" * 100_000, '{"CPU": NaN}', '{"CPU": 1e999}', '{"CPU": -1}', '{"CPU": "x"}', 1]
)
def test_what_others_write_as_a_jobs_size_takes_nothing_and_hides_no_job(size: Any) -> None:
    marks = {"dstackweb": "mine", "dstackweb_size": size}
    found = dashboard.cluster(NODES, STATUS, dashboard.jobs([shown("x", metadata=marks), shown("y")]))
    assert found == dashboard.cluster(NODES, STATUS, dashboard.jobs([shown("y")]))


def test_ended_jobs_are_deleted_after_an_hour_and_lost_ones_are_looked_for(backend: Any, monkeypatch: Any) -> None:
    lost = {"error_type": dashboard.LOST}
    listed = [
        shown("new", "SUCCEEDED"),
        shown("old", "SUCCEEDED", end_time=int(AT * 1000) - 3_700_000),
        shown("theirs", "SUCCEEDED", "theirs", end_time=int(AT * 1000) - 3_700_000),
        shown("left", "FAILED", **lost),
        shown("gone", "FAILED", **lost),
    ]
    called: list[tuple[str, str]] = []

    def call(_self: Any, method: str, path: str, _body: Any = None) -> dashboard.Answer:
        called.append((method, path))
        return dashboard.Answer(listed if method == "GET" else {"stopped": "left" in path}, AT)

    monkeypatch.setattr(Dashboard, "call", call)
    found = {job.instance: job.state for job in registry.cloud(backend).instances("cluster", "mine")}
    assert [path for method, path in called if method == "DELETE"] == ["api/jobs/old"]
    assert set(found) == {"new", "old", "left", "gone"}
    assert (found["left"], found["gone"]) == (InstanceState.ENDING, InstanceState.GONE)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "config",
    [{}, {"address": "ray.example:8265"}, {"address": "ftp://ray.example"}, {"address": "http://ray.example:8265"},
     {"address": "https://me:secret@ray.example"}, {"address": "https://ray.example/?x=1"},
     {"address": "https://ray.example", "resources": ["CPU=1"]}, {"address": "https://ray.example", "resources": ["a"]},
     {"address": "https://ray.example", "resources": ["a=-1"]},
     {"address": "https://ray.example", "resources": ["a=nan"]},
     {"address": "https://ray.example", "gpu_memory": ["A100"]}, {"address": "https://ray.example", "projects": []}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        services.put("cluster", "ray", {"projects": ["main"]} | config)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("address", "uid", "allowed", "is_refused"),
    [("http://127.0.0.1:9", 1000, False, True), ("http://127.0.0.1:9", 1000, True, False),
     ("http://127.0.0.1:9", 0, False, False), ("https://ray.example", 1000, False, False)],
)  # fmt: skip
def test_no_job_gets_the_servers_user_unless_an_admin_allows_it(
    monkeypatch: Any, settings: Any, address: str, uid: int, allowed: bool, is_refused: bool
) -> None:
    settings.DSTACKWEB_SHARED_UID = allowed
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(Dashboard, "call", lambda *_: dashboard.Answer(shown("u-1"), AT))
    config = {"projects": ["main"], "address": address}
    backend, _is_new = services.put("cluster", "ray", config)
    order = InstanceOrder("u-1", "mine", "cluster", "cpu", False, "#!/bin/sh")
    if is_refused:
        with pytest.raises(LaunchFailed):
            registry.cloud(backend).launch(order)
        assert registry.KINDS["ray"].test_connection(config, "").state == "failed"
    else:
        assert registry.cloud(backend).launch(order).instance == "u-1"


@pytest.mark.django_db
def test_a_token_is_stored_apart_and_plain_http_over_a_network_has_to_be_allowed() -> None:
    config = {"projects": ["main"], "address": "http://ray.example:8265/", "insecure": True, "token": "hush"}
    backend, _is_new = services.put("cluster", "ray", config)
    assert "hush" not in json.dumps(backend.config)
    driver: Any = registry.driver(backend)
    assert (driver.dashboard.address, driver.dashboard.token) == ("http://ray.example:8265", "hush")
    assert "hush" not in repr(driver.dashboard)
