"""Any JSON at any place of a request's body is taken or refused with a 4xx, on every address that reads one."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction
from hypothesis import given, strategies as st
from hypothesis.extra.django import TestCase

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Backend
from dstackweb.lib.secrets import digest
from dstackweb.runs import archives
from dstackweb.runs.launch import job_token
from dstackweb.scheduler import host_agents
from tests.api.conftest import Api
from tests.api.test_backends_api import body as aws
from tests.api.test_host_agents import FACTS, FILES
from tests.api.test_runner_samples import on_a_cloud, sample
from tests.factories import join, make_host, make_project, make_run, make_user
from tests.odd import ODD, VALUES, paths, replaced
from tests.spec.test_any_value import VALID, VALID_AS_MAPPINGS

TASK = {"type": "task", "commands": ["a"]}
SUBMISSION = {"config": TASK | {"env": ["A"]}, "env": {"A": "1"}, "overrides": {"priority": 1}}
NOW = "2026-01-01T00:00:00Z"
SIZES = {"exit_code": 1, "log_size": 3, "log_missing": 1, "memory_mib": 5}
ENTRIES = {
    "attempt": 1, "reporter": "me",
    "events": [{"key": "a", "state": "running", "at": 1.5, "seq": 3, "prefix": "p"}],
    "counts": [{"prefix": "p", "seq": 2, "counts": {"running": 2}}],
    "failures": [{"key": "a", "error": "no", "at": 1.5}],
}  # fmt: skip
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "projects/main/runs/plan"): SUBMISSION,
    ("POST", "projects/main/runs"): SUBMISSION | {"archive": "{archive}"},
    ("PATCH", "projects/main/runs/target"): {"priority": 3},
    ("POST", "projects/main/runs/target/stop"): {"abort": True},
    ("POST", "projects/main/runs/placed/extend"): {"for": "1h"},
    ("POST", "projects/main/runs/placed/keep"): {"reason": "mine", "minutes": 3},
    ("POST", "projects/main/runs/placed/tasks"): ENTRIES,
    ("POST", "projects/main/holds"): {"for": "1h", "gpu": "1", "cpu": "1", "memory": "1GB", "name": "h", "priority": 1},
    ("POST", "projects/main/queues"): {"name": "night", "paused": True, "max_running": 1, "ageing_minutes": 5},
    ("PATCH", "projects/main/queues/default"): {"paused": False, "max_gpus": 3},
    ("POST", "projects/main/queues/default/move"): {"runs": ["target"], "before": "other", "dry_run": True},
    ("POST", "projects/main/queues/default/undo"): {"move": 1},
    ("POST", "projects/main/offers/refresh"): {"backends": ["example"]},
    ("PATCH", "projects/main/utilization"): {"observe_only": True},
    ("POST", "projects/main/utilization/what-if"): {
        "min_gpu_utilization": 3, "time_window": "1h", "scope": "any", "warmup": 0,
    },
    ("PATCH", "hosts/box"): {"draining": True, "labels": {"a": "b", "c": None}},
    ("POST", "hosts/box/gone"): {"reason": "burnt"},
    ("PUT", "backends/cloud"): aws("hush"),
    ("POST", "runner/hosts/box/facts"): FACTS,
    ("POST", "runner/hosts/box/files"): FILES | {"jobs": ["{job}"], "removed": True},
    ("POST", "runner/hosts/box/poll"): {
        "jobs": {"{job}": "runner"}, "failed": {"{job}": "no"}, "probe": {"error": ""},
        "samples": [sample(1.0)],
    },
    ("POST", "runner/jobs/heartbeats"): {"jobs": [{"token": "{token}", "nonce": "n1"}]},
    ("POST", "runner/jobs/{job}/claim"): {"nonce": "n1", "pid": 3, "host": "box"},
    ("POST", "runner/jobs/{job}/heartbeat"): {"beat": 1, "phase": "running"},
    ("POST", "runner/jobs/{job}/tasks"): ENTRIES,
    ("POST", "runner/jobs/{job}/samples"): {"samples": [sample(1.0)]},
    ("POST", "runner/jobs/{job}/exit"): {
        "reason": "out_of_memory", "message": "m", "signalled": True, "interruption": {"at": NOW}, **SIZES,
        "disk": {"used": 1, "limit": 1, "free": 1, "reserve": 1},
    },
}  # fmt: skip


class Deployment:
    """Something of everything that the addresses name, and each one's token."""

    def __init__(self, project: Project, member: User) -> None:
        token = "dwh_of-box"
        make_host("box", token_digest=digest(token))
        make_run(project, member, "target")
        make_run(project, member, "other")
        low = {"min_gpu_utilization": 1, "time_window": "1h"}
        job = on_a_cloud(project, member, name="placed", max_duration="9h", utilization_policy=low)
        Backend.objects.create(name="example", kind="aws")
        archive, _ = archives.store_archive(project, [b"\x1f\x8b"])
        self.known = {"job": str(job.pk), "token": job_token(job.pk), "archive": archive.sha256}
        self.root = Api(join(project, make_user("root", is_superuser=True), "admin"))
        self.tokens = {"runner/hosts/": token, "runner/jobs/": self.known["token"]}

    def filled(self, value: Any) -> Any:
        if isinstance(value, str):
            for name, known in self.known.items():
                value = value.replace("{" + name + "}", known)
            return value
        if isinstance(value, list):
            return [self.filled(one) for one in value]
        return {self.filled(key): self.filled(one) for key, one in value.items()} if isinstance(value, dict) else value

    def ask(self, method: str, path: str, body: Any) -> int:
        """The status of the answer; nothing of it stays."""
        own = next((token for start, token in self.tokens.items() if path.startswith(start)), None)
        headers = {"Authorization": f"Bearer {own}", "X-Nonce": "n1"} if own else {}
        with transaction.atomic():
            answer = self.root(method, self.filled(path), self.filled(body), **headers)
            assert answer.status_code < 500, (method, path, body, answer.content)
            assert answer.status_code == 204 or "detail" in answer.json() or answer.status_code < 400
            transaction.set_rollback(True)
        return int(answer.status_code)


@pytest.fixture
def deployment_of_all(project: Project, member: User, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setattr(host_agents, "_known", host_agents.KnownHosts())
    return Deployment(project, member)


@pytest.mark.nightly
@pytest.mark.both_sides
@pytest.mark.postgres  # which refuses more values than SQLite
@pytest.mark.parametrize(("method", "path"), BODIES, ids=lambda part: part.replace("/", "-"))
def test_an_odd_value_at_every_place_of_a_body(deployment_of_all: Deployment, method: str, path: str) -> None:
    body = BODIES[method, path]
    assert deployment_of_all.ask(method, path, body) < 300 or path.endswith(("undo", "gone"))
    for place in paths(body):
        for value in ODD:
            deployment_of_all.ask(method, path, replaced(body, place, value))


class AnyValue(TestCase):
    """Any value at any place of a run file: a plan, or its errors."""

    def setUp(self) -> None:
        project = make_project("main")
        self.api = Api(join(project, make_user("ada"), "manager"))

    @given(st.sampled_from([VALID, VALID_AS_MAPPINGS]), st.data(), VALUES)
    def test_a_plan(self, form: dict[str, Any], data: st.DataObject, value: Any) -> None:
        config = replaced(form, data.draw(st.sampled_from(list(paths(form)))), value)
        for body in ({"config": config}, {"config": TASK, "overrides": config}):
            assert self.api("POST", "projects/main/runs/plan", body).status_code in (200, 422)


def test_the_run_file_that_reads_a_list_as_its_type(api: Api) -> None:
    answer = api("POST", "projects/main/runs/plan", {"config": TASK | {"type": ["task"]}})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == ["type"]
