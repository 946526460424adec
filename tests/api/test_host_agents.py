"""What an agent of a joined host sends and gets, without an agent (docs/runner.md)."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts import inventory, joining
from dstackweb.backends.models import Gpu, Host
from dstackweb.gpus.models import GpuSample, HostSampling
from dstackweb.lib.secrets import digest
from dstackweb.runs.attempts import RUNNER_GONE_S
from dstackweb.runs.launch import job_of_token, job_token
from dstackweb.runs.models import Job, RemovedRun, Run
from dstackweb.runs.services import stop
from dstackweb.scheduler import host_agents, watch
from dstackweb.scheduler.models import Retention
from tests.factories import as_if, make_host, make_run, make_user, place_all, placed_job, start
from tests.gpus.snapshots import sample

pytestmark = pytest.mark.django_db
FACTS = {
    "version": "0.1.0", "starting": True, "labels": {"disk": "nvme"}, "address": "10.0.0.7", "cpus": 4,
    "memory_mib": 4096, "boot_id": "b", "gpus": [{"uuid": "GPU-far-0", "index": 0, "name": "A100", "memory_mib": 8192}],
    "cgroups": {"version": "v2", "memory": True, "cpu": True}, "isolation": "shared", "job_user": "",
    "runs_dir": "/tmp/runs", "error": "",
}  # fmt: skip


FILES = {"jobs": [], "runs": [], "pruned": {"jobs": 0, "runs": 0}, "waiting": {"jobs": 0, "runs": 0}}


class Agent:
    """What an agent sends, by hand."""

    def __init__(self, name: str, token: str, process: str = "") -> None:
        self.name, self.token, self.process = name, token, process

    def post(self, what: str, body: object, name: str = "") -> Any:
        return Client().post(
            f"/api/v1/runner/hosts/{name or self.name}/{what}",
            body if isinstance(body, str) else json.dumps(body),
            content_type="application/json",
            headers={"Authorization": f"Bearer {self.token}", "X-Nonce": self.process},
        )

    def poll(self, **said: Any) -> Any:
        answer = self.post("poll", {"jobs": {}, **said})
        assert answer.status_code == 200, answer.content
        return answer.json()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call reads the hosts again."""
    monkeypatch.setattr(host_agents, "REFRESH_S", 0.0)
    monkeypatch.setattr(host_agents, "_known", host_agents.KnownHosts())


def agent(name: str = "far", **fields: Any) -> Agent:
    """The agent of a host that has joined and is online."""
    token = f"dwh_of-{name}"
    make_host(name, token_digest=digest(token), **fields)
    return Agent(name, token)


def placed(project: Project, member: User, **keys: Any) -> Job:
    run = make_run(project, member, **keys)
    place_all()
    return placed_job(run)


def test_a_machine_joins_registers_and_is_online(project: Project) -> None:
    root = make_user("root", is_superuser=True)
    row, _token = joining.invite(root)
    far = Agent("far", joining.join(row, joining.JoinRequest("far", "https://gpus.example.org", nonce="n")))
    assert far.poll()["register"]
    assert far.post("facts", FACTS).json() == {}
    answer = far.poll()
    assert (answer["register"], answer["active"]) == (False, [])
    host = Host.objects.get()
    assert (host.cpus, host.labels, host.agent_version, host.heartbeats) == (4, {"disk": "nvme"}, "0.1.0", 2)
    assert inventory.is_online(host)
    assert Gpu.objects.get().uuid == "GPU-far-0"
    assert {event.kind for event in host.events.all()} == {"admitted", "joined"}
    assert digest(far.token) == host.token_digest


def test_only_the_machine_that_used_an_invite_may_repeat_the_join(project: Project) -> None:
    row, _token = joining.invite(make_user("root", is_superuser=True))
    machine = joining.JoinRequest("far", "https://gpus.example.org", nonce="n")
    first = joining.join(row, machine)
    row.refresh_from_db()
    second = joining.join(row, machine)
    assert Agent("far", first).post("poll", {"jobs": {}}).status_code == 401
    assert Agent("far", second).post("poll", {"jobs": {}}).status_code == 200
    with pytest.raises(joining.Forbidden, match="was used already by far"):
        joining.join(row, joining.JoinRequest("far", "https://gpus.example.org", nonce="other"))


def test_a_token_authenticates_only_its_own_host(project: Project, member: User) -> None:
    far, other = agent("far", gpus=1), agent("other")
    for what, body in (("poll", {"jobs": {}}), ("facts", FACTS), ("files", {})):
        assert far.post(what, body, name="other").status_code in (403, 422)
        assert Agent("far", "dwh_nonsense").post(what, body).status_code == 401
    assert far.post("poll", {"jobs": {}}, name="other").status_code == 403
    job = placed(project, member, resources={"gpu": 1})
    # Whatever another host says of the job changes nothing.
    as_if(Job.objects.all(), silent_s=RUNNER_GONE_S + 1)
    answer = other.poll(jobs={str(job.pk): "gone"}, failed={str(job.pk): "no"})
    assert (answer["active"], answer["start"]) == ([], [])
    assert Job.objects.get().status == "provisioning"
    # Nor can it take a GPU that is seen there.
    other.post("facts", FACTS | {"gpus": [{"uuid": "GPU-far-0", "index": 0, "name": "A100", "memory_mib": 8}]})
    assert Gpu.objects.get().host.name == "far"
    assert "is on host far, which is online" in Host.objects.get(name="other").error
    # Nor one that a job has there, once that host is silent: it could say how the job uses it.
    Host.objects.filter(name="far").update(silent_s=1e6)
    other.post("facts", FACTS | {"gpus": [{"uuid": "GPU-far-0", "index": 0, "name": "A100", "memory_mib": 8}]})
    assert Gpu.objects.get().host.name == "far"
    assert "is on host far, in a job" in Host.objects.get(name="other").error


def test_a_second_machine_with_a_copy_of_a_hosts_settings_gets_no_orders(project: Project, member: User) -> None:
    token = agent("far", gpus=1).token
    first, copy = Agent("far", token, "first"), Agent("far", token, "copy")
    assert first.post("facts", FACTS | {"home": "1-1"}).status_code == 200
    job = placed(project, member)
    elsewhere = FACTS | {"boot_id": "other", "home": "1-1", "runs_dir": "/elsewhere"}
    for what, body in (("facts", elsewhere), ("poll", {"jobs": {}}), ("files", FILES)):
        refused = copy.post(what, body)
        assert refused.status_code == 409
        assert refused.json()["detail"] == ("Host far is in use by another machine. Join this one under its own name.")
    assert Host.objects.get().runs_dir == FACTS["runs_dir"]
    assert [order["job"] for order in first.poll()["start"]] == [str(job.pk)]


def test_another_machine_takes_over_a_host_only_after_half_a_minute_of_silence(project: Project) -> None:
    token = agent("far").token
    first, second = Agent("far", token, "first"), Agent("far", token, "second")
    first.post("facts", FACTS)
    Host.objects.update(silent_s=host_agents.TAKEN_OVER_S - 1)
    assert second.post("facts", FACTS | {"boot_id": "other"}).status_code == 409
    heartbeats = Host.objects.get().heartbeats
    second.post("poll", {"jobs": {}})
    assert Host.objects.get().heartbeats == heartbeats, "a stranger's calls are no life of the host"
    Host.objects.update(silent_s=host_agents.TAKEN_OVER_S + 1)
    assert second.post("facts", FACTS | {"boot_id": "other"}).status_code == 200
    assert second.poll()["active"] == []
    assert first.post("poll", {"jobs": {}}).status_code == 409


def test_an_agent_that_was_restarted_takes_over_at_once(project: Project) -> None:
    token = agent("far").token
    first, again = Agent("far", token, "first"), Agent("far", token, "again")
    assert first.post("facts", FACTS | {"home": "1-1"}).status_code == 200
    assert Agent("far", token, "copy").post("facts", FACTS | {"home": "1-2"}).status_code == 409
    assert again.post("facts", FACTS | {"home": "1-1"}).status_code == 200
    assert again.poll()["active"] == []


def test_a_machine_that_joins_again_takes_its_name_over_at_once(project: Project) -> None:
    first = Agent("far", agent("far").token, "first")
    first.post("facts", FACTS)
    Host.objects.update(silent_s=1e6)
    row, _token = joining.invite(make_user("root", is_superuser=True))
    token = joining.join(row, joining.JoinRequest("far", "https://gpus.example.org", nonce="n"))
    Host.objects.update(silent_s=0)
    assert Agent("far", token, "second").post("facts", FACTS | {"boot_id": "other"}).status_code == 200


def test_a_stranger_does_not_have_all_hosts_read() -> None:
    agent()
    with CaptureQueriesContext(connection) as asked:
        assert Agent("far", "dwh_nonsense").post("poll", {"jobs": {}}).status_code == 401
    assert not any("EXISTS(SELECT" in one["sql"] or "FOR " in one["sql"] for one in asked)
    assert len(asked) == 1


def test_what_a_claim_says_of_its_machine_is_short(project: Project, member: User) -> None:
    agent()
    job = placed(project, member)
    body = json.dumps({"nonce": "n", "host": "h" * 10_000})
    token = {"Authorization": f"Bearer {job_token(job.pk)}"}
    url = f"/api/v1/runner/jobs/{job.pk}/claim"
    assert Client().post(url, body, content_type="application/json", headers=token).status_code == 422


def test_a_job_is_started_until_its_runner_lives(project: Project, member: User) -> None:
    far = agent()
    job = placed(project, member)
    first = far.poll()
    assert (first["active"], first["again_s"]) == ([str(job.pk)], host_agents.BUSY_POLL_S)
    assert job_of_token(first["start"][0]["token"]) == job.pk
    assert first["start"][0]["run_uid"] == str(job.run.uid)
    assert far.poll()["start"] == first["start"]
    for state in ("starting", "runner"):
        assert far.poll(jobs={str(job.pk): state})["start"] == []
    start(job)
    assert far.poll(jobs={str(job.pk): "left"})["start"] == first["start"]
    assert far.poll(jobs={str(job.pk): "gone"})["start"] == first["start"]


def test_a_job_ends_only_once_its_host_reports_that_all_its_processes_ended(project: Project, member: User) -> None:
    far = agent()
    job = start(placed(project, member))
    as_if(Job.objects.all(), silent_s=RUNNER_GONE_S + 1)
    for known in ({}, {"jobs": {str(job.pk): "left"}}, {"jobs": {str(job.pk): "runner"}}):
        far.poll(**known)
        assert Job.objects.get().status == "running"
    assert far.poll(jobs={str(job.pk): "gone"})["active"] == []
    assert Job.objects.get().termination_reason == "instance_unreachable"


def test_a_start_that_fails_returns_the_run_and_counts_against_the_host(project: Project, member: User) -> None:
    far = agent()
    job = placed(project, member)
    answer = far.poll(failed={str(job.pk): "OSError: No space left on device"})
    assert answer["active"] == []
    assert Run.objects.get().status == "submitted"
    host = Host.objects.get()
    assert (host.start_failures, host.start_error) == (1, "OSError: No space left on device")
    # Once a runner has claimed a job, a failed start of another ends nothing.
    job = placed(project, member)
    start(job)
    far.poll(failed={str(job.pk): "again"})
    assert Job.objects.get(pk=job.pk).status == "running"


def test_a_held_back_host_makes_a_trial_start_and_takes_jobs_once_it_succeeds() -> None:
    far = agent()
    for _ in range(inventory.HOLD_BACK_AFTER):
        inventory.count_failed_start(Host.objects.get().pk, "full", timezone.now())
    assert job_of_token(far.poll()["probe"]["token"]) is not None
    far.poll(probe={"error": "still full"})
    assert Host.objects.get().start_error == "still full"
    far.poll(probe={"error": ""})
    assert Host.objects.get().held_back_at is None
    assert "probe" not in far.poll()


def test_a_stopped_job_gets_a_stop_order_and_a_kill_order_after_its_grace(project: Project, member: User) -> None:
    far = agent()
    job = start(placed(project, member))
    stop(Run.objects.get(), member, "member")
    lives = {"jobs": {str(job.pk): "runner"}}
    answer = far.poll(**lives)
    assert (answer["stop"], answer["kill"], answer["start"]) == ([str(job.pk)], [], [])
    as_if(Job.objects.all(), status_s=3600)
    assert far.poll(**lives)["kill"] == [str(job.pk)]
    assert far.poll(jobs={str(job.pk): "gone"})["start"][0]["job"] == str(job.pk)


def test_samples_are_stored_at_their_age_for_the_hosts_own_gpus(project: Project, member: User) -> None:
    far = agent(gpus=1)
    make_host("other", gpus=1)
    start(placed(project, member, resources={"gpu": 1}))
    gpus = [
        vars(sample(uuid, 40)) if hasattr(sample(uuid, 40), "__dict__") else None
        for uuid in ("GPU-far-0", "GPU-other-0")
    ]
    now = timezone.now()
    far.poll(samples=[{"age_s": 3.0, "took_ms": 2.5, "gpus": gpus}, {"age_s": 13.0, "took_ms": 2.5, "gpus": gpus}])
    stored = list(GpuSample.objects.order_by("at_ms"))
    assert [one.series.uuid for one in stored] == ["GPU-far-0", "GPU-far-0"]
    assert abs(stored[1].at_ms - (now.timestamp() - 3) * 1000) < 2000
    assert HostSampling.objects.get().took_ms == 2.5


def test_a_host_that_was_removed_since_it_was_last_read_is_let_go(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = agent()
    far.poll()
    monkeypatch.setattr(host_agents, "REFRESH_S", 3600.0)
    Host.objects.update(left_at=timezone.now(), draining=True, leaving=True)
    assert far.poll(samples=[{"age_s": 1, "gpus": []}]) == {"removed": True}


def test_removed_and_revoked_hosts_are_refused(project: Project) -> None:
    root = make_user("root", is_superuser=True)
    far, other = agent("far"), agent("other")
    inventory.leave(Host.objects.get(name="far"), root)
    assert "active" in far.poll()
    watch.remove_left_hosts()
    assert far.poll() == {"removed": True}
    assert far.post("facts", FACTS).json() == {"removed": True}
    assert far.post("files", FILES).status_code == 403
    assert Host.objects.get(name="far").left_at is not None
    joining.revoke(Host.objects.get(name="other"), root)
    assert other.post("poll", {"jobs": {}}).status_code == 401


def test_a_host_may_remove_ended_jobs_and_no_unknown_ones(project: Project, member: User, settings: Any) -> None:
    far = agent()
    job, (ended, gone, unknown) = placed(project, member), (uuid4(), uuid4(), uuid4())
    long_ago = timezone.now() - dt.timedelta(days=settings.DSTACKWEB_RUN_DIRS_DAYS + 1)
    run = make_run(project, member)
    Run.objects.filter(pk=run.pk).update(uid=ended, status="done", ended_at=long_ago)
    RemovedRun.objects.create(uid=gone, ended_at=timezone.now(), at=timezone.now())
    asked = {
        "jobs": [str(job.pk), str(unknown)], "runs": [str(ended), str(job.run.uid), str(unknown)],
        "removed": True, "pruned": {"jobs": 2, "runs": 1}, "waiting": {"jobs": 0, "runs": 7},
    }  # fmt: skip
    answer = far.post("files", asked).json()
    assert answer == {"jobs": [str(unknown)], "runs": sorted([str(ended), str(gone)])}
    assert far.post("files", asked | {"removed": False}).json()["runs"] == [str(ended)]
    assert set(Retention.objects.values_list("kind", "pruned", "waiting")) == {("job_files", 4, 0), ("run_dirs", 2, 7)}


def test_an_idle_host_costs_one_short_transaction_and_its_neighbours_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = [agent(f"box-{number}") for number in range(5)]
    for one in agents:
        one.poll()
    monkeypatch.setattr(host_agents, "REFRESH_S", 60.0)
    with CaptureQueriesContext(connection) as none:
        for one in agents:
            assert one.poll()["again_s"] == host_agents.IDLE_POLL_S
    assert len(none) == 0
    monkeypatch.setattr(host_agents, "REFRESH_S", 0.0)
    with CaptureQueriesContext(connection) as few:
        agents[0].poll()
    assert len([one for one in few if "SAVEPOINT" not in one["sql"]]) == 2
    # What they sent meanwhile has counted.
    assert min(Host.objects.values_list("heartbeats", flat=True)) >= 2


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("poll", "[]"), ("poll", "nonsense"), ("poll", {}), ("poll", {"jobs": {"x": "runner"}}),
        ("poll", {"jobs": {str(uuid4()): "asleep"}}), ("poll", {"jobs": {}, "samples": [{"age_s": -1, "gpus": []}]}),
        ("poll", {"jobs": {}, "samples": [{"age_s": 1e9, "gpus": []}]}), ("poll", {"jobs": {}, "probe": "yes"}),
        ("facts", {}),
        ("facts", FACTS | {"cpus": 0}), ("facts", FACTS | {"isolation": "hope"}),
        ("facts", FACTS | {"runs_dir": "runs"}),
        ("facts", FACTS | {"labels": {"a b": "c"}}), ("facts", FACTS | {"address": "a b"}),
        ("facts", FACTS | {"gpus": [{"uuid": "", "index": 0, "name": "", "memory_mib": 1}]}),
        ("files", {"jobs": ["x"]}),
    ],
)  # fmt: skip
def test_bad_input_is_refused_and_changes_nothing(what: str, body: object) -> None:
    far = agent()
    before = Host.objects.values().get()
    assert far.post(what, body).status_code == 422
    after = Host.objects.values().get()
    assert {name for name in before if before[name] != after[name]} <= {"heartbeats", "seen_at"}
