"""The agent of a joined host against an API that answers as the test wants, without processes of jobs."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dstackweb.runner import host_agent
from dstackweb.runner.client import Refused, Unreachable
from dstackweb.runner.engine import FAILED_FILE, note_failed
from dstackweb.runner.host_agent import Cleanup, HostAgent
from dstackweb.runner.jobs import LocalJobs, NotLaunched, old_runs
from dstackweb.runner.machine import GpuProbe, Probe
from dstackweb.runner.nvml import Sample, Snapshot
from dstackweb.runner.state import HOST_CONFIG

IDLE = {"active": [], "again_s": 2.0}
GPU = Snapshot((Sample("GPU-1", 0, "A100", 81920, 50),))


class Api:
    """Answers each call with the next of `answers`, the last one again and again; `calls` are what it got."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls = list(answers), list[tuple[str, Any]]()
        self.refuses: Callable[[str, dict[str, Any]], bool] = lambda path, body: False

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((path, body))
        if self.refuses(path, body):
            raise Refused(422, {"detail": "gpus.0.uuid: too long"})
        if path == "facts":
            return {}
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        found: dict[str, Any] = answer
        return found

    def close(self) -> None:
        """As a connection."""

    def polls(self) -> list[dict[str, Any]]:
        return [body for path, body in self.calls if path == "poll"]


class Seen:
    """A probe that has been made."""

    every_s = 10.0

    def current(self) -> Probe:
        return Probe(4, 4096, (), "boot")


Make = Callable[..., tuple[HostAgent, Api]]


def write_config(home: Path, token: str = "dwh_1") -> None:
    values = {"url": "http://127.0.0.1:1", "name": "far", "token": token, "insecure": False, "shared_uid": True}
    (home / HOST_CONFIG).write_text(json.dumps(values))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """An agent in a home of its own, and the API that it calls."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    write_config(tmp_path)

    def agent(*answers: Any) -> tuple[HostAgent, Api]:
        made, api = HostAgent(str(tmp_path), {"disk": "nvme"}, ""), Api(*answers)
        made.client = api  # type: ignore[assignment]
        made.background = Seen()  # type: ignore[assignment]
        return made, api

    return agent


def orders(job: str) -> dict[str, Any]:
    return {"job": job, "token": "t", "run_uid": str(uuid4()), "node": 0}


def test_the_machine_is_registered_first_and_again_only_when_the_server_wants_it(make: Make) -> None:
    agent, api = make(IDLE, IDLE | {"register": True}, IDLE)
    for _ in range(4):
        agent._turn()
    assert [path for path, _body in api.calls] == ["facts", "poll", "poll", "facts", "poll", "poll"]
    facts = api.calls[0][1]
    assert (facts["cpus"], facts["labels"], facts["starting"], facts["isolation"]) == (
        4,
        {"disk": "nvme"},
        True,
        "shared",
    )


def test_a_broken_engine_is_reported_with_the_next_exchange_though_the_probe_is_older(
    make: Make, tmp_path: Path
) -> None:
    docker = {"name": "docker", "version": "28", "code": "", "error": "", "volumes": []}
    agent, api = make(IDLE)
    agent.background.current = lambda: Probe(4, 4096, (), "boot", engine=docker)  # type: ignore[union-attr, method-assign]
    agent._turn()
    note_failed(str(tmp_path), "no space")
    agent._turn()
    assert agent._complete("1", "t")["engine"] is None
    (tmp_path / FAILED_FILE).unlink()  # a try has worked
    agent._turn()
    facts = [(body["engine"]["code"], body["starting"]) for path, body in api.calls if path == "facts"]
    assert facts == [("", True), ("failed", False), ("", False)]


def test_a_removed_host_exits_and_a_refused_one_continues_with_a_new_token(make: Make, tmp_path: Path) -> None:
    agent, _api = make({"removed": True})
    assert agent._turn() is None
    agent, _api = make(Refused(401, {"detail": "no"}))
    write_config(tmp_path, "dwh_2")
    assert agent._turn()
    assert agent.config["token"] == "dwh_2"


def test_a_failed_start_is_reported_until_the_server_acknowledges_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = str(uuid4())
    agent, api = make(IDLE | {"active": [job], "start": [orders(job)]}, Unreachable("away"), IDLE)

    def full(complete: dict[str, Any]) -> None:
        assert (complete["job"], complete["api"], complete["user"]) == (job, "http://127.0.0.1:1", None)
        raise NotLaunched("No space left on device")

    monkeypatch.setattr(agent.jobs, "launch", full)
    agent._turn()
    while agent.working:
        agent._wait(60.0)  # ends early, because the start has ended
    for _ in range(3):
        agent._turn()
    assert [poll["failed"] for poll in api.polls()] == [{}, *[{job: "No space left on device"}] * 2, {}]
    assert api.polls()[1]["jobs"] == {job: "gone"}


def test_a_restored_server_gets_the_tickets_in_pieces_and_again_if_an_answer_is_lost(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_agent, "TICKETS_AT_ONCE", 2)
    asks = IDLE | {"tickets": True}
    agent, api = make(asks, Unreachable("away"), asks, IDLE)
    held = [{"ticket": name, "nonce": "n", "ended": True} for name in "abc"]
    monkeypatch.setattr(agent.jobs, "tickets", lambda: held)
    for _ in range(5):
        agent._turn()
    said = [(body.get("tickets"), body.get("tickets_left")) for body in api.polls()]
    assert said == [(None, None), (held[:2], 1), (held[:2], 1), (held[2:], 0), (None, None)]


def test_samples_are_kept_while_the_server_is_away_and_sent_once(make: Make) -> None:
    agent, api = make(Unreachable("away"), IDLE)
    agent.snapshots.append((time.monotonic() - 5, GPU))
    for _ in range(3):
        agent._turn()
    sent = [poll["samples"] for poll in api.polls()]
    assert [len(samples) for samples in sent] == [1, 1, 0]
    assert sent[1][0]["age_s"] >= 5
    assert sent[1][0]["gpus"][0]["utilization"] == 50


def test_samples_that_the_server_refuses_are_dropped_and_named_and_jobs_go_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    agent, api = make(IDLE)
    api.refuses = lambda path, body: path == "poll" and bool(body["samples"])
    agent.snapshots.append((995.0, GPU))
    for _ in range(3):
        assert agent._turn() == IDLE["again_s"], "what its jobs need is known"
    assert [len(poll["samples"]) for poll in api.polls()] == [1, 0, 0, 0]
    errors = [body["error"] for path, body in api.calls if path == "facts"]
    assert errors == ["", "the server refuses samples of the GPUs: 422: gpus.0.uuid: too long"]

    api.refuses = lambda path, body: False
    clock[0] += host_agent.REFUSAL_SHOWN_S + 1
    agent.snapshots.append((clock[0], GPU))
    for _ in range(2):
        agent._turn()
    assert api.calls[-2][1]["error"] == ""


def test_a_machine_whose_gpus_the_server_refuses_is_registered_without_them(make: Make) -> None:
    agent, api = make(IDLE)
    agent.background.current = lambda: Probe(4, 4096, (GpuProbe("x" * 81, 0, "A100", 81920),), "boot")  # type: ignore[method-assign,union-attr]
    api.refuses = lambda path, body: path == "facts" and bool(body["gpus"])
    for _ in range(2):
        agent._turn()
    assert [path for path, _body in api.calls] == ["facts", "facts", "poll", "poll"]
    assert (api.calls[1][1]["gpus"], api.calls[1][1]["starting"]) == ([], True)
    assert api.calls[1][1]["error"] == "the server refuses the GPUs: 422: gpus.0.uuid: too long"


def test_a_machine_without_gpus_reports_that_once_a_minute(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, api = make(IDLE)
    for _ in range(3):
        agent.snapshots.append((time.monotonic(), Snapshot(library=False)))
        agent._turn()
    agent.next_empty = 0.0
    agent._turn()
    assert [[one["library"] for one in poll["samples"]] for poll in api.polls()] == [[False], [], [], [False]]


def test_a_job_is_started_in_one_thread_at_a_time_and_nudged_to_stop(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, started, nudged = str(uuid4()), list[Any](), list[str]()
    agent, api = make(IDLE | {"active": [job], "start": [orders(job)], "stop": [job]})
    monkeypatch.setattr(agent.pool, "submit", lambda step, argument: started.append(argument))
    monkeypatch.setattr(agent.jobs, "nudge", nudged.append)
    agent._turn()
    agent._turn()
    assert (len(started), nudged) == (1, [job, job])
    assert api.polls()[1]["jobs"] == {job: "starting"}


def test_old_files_are_deleted_only_on_order_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, runs = [str(uuid4()) for _ in range(3)], [str(uuid4()) for _ in range(2)]
    for name in jobs:
        (tmp_path / "jobs" / name).mkdir(parents=True)
    for name in [*runs, "not-a-run"]:
        (tmp_path / "runs" / name).mkdir(parents=True)
    os.utime(tmp_path / "runs" / runs[0], (0, 0))
    assert old_runs(str(tmp_path / "runs"), 60) == [runs[0]]
    api = Api({"jobs": jobs[:2], "runs": [*runs, str(uuid4())]})
    cleaner = Cleanup(LocalJobs(str(tmp_path)))
    monkeypatch.setattr(host_agent, "CLEANUP_S", 60.0)
    cleaner._round(-1, 60, api, str(tmp_path / "runs"))  # type: ignore[arg-type]
    asked = api.calls[0][1]
    assert (sorted(asked["jobs"]), asked["runs"], asked["removed"]) == (sorted(jobs), [runs[0]], True)
    assert os.listdir(tmp_path / "jobs") == [jobs[2]]
    assert os.listdir(tmp_path / "runs") == ["not-a-run"]
    cleaner._round(-1, 60, api, str(tmp_path / "runs"))  # type: ignore[arg-type]
    assert api.calls[1][1]["pruned"] == {"jobs": 2, "runs": 2}


def test_the_agent_knows_the_jobs_that_its_home_names_and_no_others(tmp_path: Path) -> None:
    assert LocalJobs(str(tmp_path)).all() == []
    for name in ("heartbeats", "../x", str(uuid4())):
        (tmp_path / "jobs" / name).mkdir(parents=True, exist_ok=True)
    jobs = LocalJobs(str(tmp_path))
    assert len(jobs.all()) == 1
    assert not jobs.is_ours(os.getpid())
    assert jobs.forget(["../../etc"]) == 0
    with pytest.raises(ValueError, match="badly formed"):
        jobs.probe({"job": "../x"})


def test_the_agent_does_not_start_without_its_file_or_next_to_another_agent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_agent.tree, "protect_memory", lambda: None)
    assert host_agent.main(["--home", str(tmp_path)]) == host_agent.NEVER
    assert "can't start" in capfd.readouterr().err
    with (tmp_path / "host.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert host_agent.main(["--home", str(tmp_path)]) == host_agent.NEVER
    assert "another host uses" in capfd.readouterr().err
