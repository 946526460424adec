"""The runner's side of the API, without a runner: who is let in, and what each call does."""

from __future__ import annotations

from typing import Any

import pytest
from django.conf import LazySettings
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import delete_secret, set_secret
from dstackweb.progress.models import TaskFailure
from dstackweb.runs import logs
from dstackweb.runs.launch import job_token
from dstackweb.runs.models import Job, Run
from dstackweb.runs.services import Submission, stop, submit
from dstackweb.wording.statuses import run_message
from tests.factories import as_if, make_host, make_run, place_all, placed_job


class Runner:
    """What a runner sends, by hand."""

    def __init__(self, job: Job, nonce: str = "n1", token: str = "") -> None:
        self.base = f"/api/v1/runner/jobs/{job.pk}"
        self.headers = {"Authorization": f"Bearer {token or job_token(job.pk)}", "X-Nonce": nonce}
        self.nonce, self.token = nonce, token or job_token(job.pk)

    def post(self, path: str, body: object = None) -> HttpResponse:
        return Client().post(f"{self.base}/{path}", body or {}, content_type="application/json", headers=self.headers)

    def get(self, path: str) -> HttpResponse:
        return Client().get(f"{self.base}/{path}", headers=self.headers)

    def log(self, offset: int, data: bytes, more: str = "") -> HttpResponse:
        url = f"{self.base}/logs?offset={offset}{more}"
        return Client().post(url, data, content_type="application/octet-stream", headers=self.headers)

    def claim(self) -> HttpResponse:
        return self.post("claim", {"nonce": self.nonce, "pid": 1, "host": "here"})


@pytest.fixture
def run(project: Project, member: User) -> Run:
    make_host()
    run = make_run(project, member, commands=["python train.py"])
    place_all()
    return run


@pytest.fixture
def runner(run: Run) -> Runner:
    return Runner(placed_job(run))


def fresh(run: Run) -> Run:
    return Run.objects.get(pk=run.pk)


def test_a_job_is_claimed_once_described_started_and_ended(run: Run, runner: Runner) -> None:
    assert runner.claim().status_code == 200
    assert Runner(placed_job(run), "n2").claim().status_code == 409
    spec = runner.get("spec").json()
    assert (spec["commands"], spec["run"], spec["nodes"]) == (["python train.py"], run.name, 1)
    assert spec["max_duration_s"] == 24 * 3600
    runner.post("started")
    assert fresh(run).status == "running"
    runner.post("exit", {"exit_code": 0, "reason": "done_by_runner", "log_size": 0})
    assert fresh(run).status == "done"
    assert runner.post("exit", {"exit_code": 1, "reason": "executor_error"}).status_code == 200
    assert fresh(run).status == "done"


def test_a_job_is_limited_to_the_upper_ends_of_its_ranges(project: Project, member: User) -> None:
    make_host(memory_gib=32)
    run = make_run(project, member, resources={"cpu": "2..4", "memory": "1GB..3GB"})
    place_all()
    runner = Runner(placed_job(run))
    runner.claim()
    spec = runner.get("spec").json()
    assert (spec["cpus"], spec["cpu_max"]) == (2, 4)
    assert (spec["memory_mib"], spec["memory_max_mib"], spec["host_memory_mib"]) == (1024, 3072, 32 * 1024)


@pytest.mark.parametrize(
    ("limit", "words"),
    [(4096, "It needed more than its limit of 4 GB."), (None, "The memory of its machine was used up.")],
)
def test_a_job_that_ran_out_of_memory_ends_with_that_reason(
    run: Run, runner: Runner, limit: int | None, words: str
) -> None:
    runner.claim()
    runner.post("started")
    runner.post("exit", {"exit_code": 137, "reason": "out_of_memory", "memory_mib": limit})
    job = placed_job(run)
    assert (fresh(run).status, job.termination_reason, job.exit_code) == ("failed", "out_of_memory", 137)
    assert words in run_message(fresh(run))


@pytest.mark.parametrize(
    ("disk", "words"),
    [
        ({"used": 3 << 30, "limit": 2 << 30}, "Its files take 3 GB; a job may have 2 GB"),
        ({"free": 1 << 30, "reserve": 2 << 30}, "Its host has 1 GB free, and jobs must leave 2 GB"),
        ({"used": None, "limit": 2 << 30}, "nested too deep"),
        (
            {"free_inodes": 812, "inode_reserve": 1023},
            "Its host's disk has room for 812 more files, and jobs must leave room for 1,023",
        ),
    ],
)
def test_a_job_whose_files_take_too_much_ends_with_that_reason(
    run: Run, runner: Runner, disk: dict[str, int | None], words: str
) -> None:
    runner.claim()
    runner.post("started")
    runner.post("exit", {"exit_code": 137, "reason": "out_of_disk", "disk": disk})
    assert (fresh(run).status, placed_job(run).termination_reason) == ("failed", "out_of_disk")
    assert words in run_message(fresh(run))


def test_the_limits_of_the_disk_come_with_the_spec(runner: Runner, settings: Any) -> None:
    settings.DSTACKWEB_JOB_DISK_GB, settings.DSTACKWEB_DISK_RESERVE_GB = 5, 0
    spec = runner.claim().json()["spec"]
    assert (spec["disk_limit"], spec["disk_reserve"], spec["inode_reserve"]) == (5 << 30, None, 5)


def test_refused_code_fails_the_run_once_and_is_not_held_against_its_host(project: Project, member: User) -> None:
    host = make_host()
    run = make_run(project, member, retry=True)
    place_all()
    runner = Runner(placed_job(run))
    runner.claim()
    refused = {"fault": "too_large", "name": "", "limit": 4 << 30}
    assert runner.post("exit", {"reason": "code_refused", "code_refused": refused}).status_code == 200
    host.refresh_from_db()
    assert (fresh(run).status, placed_job(run).termination_reason) == ("failed", "code_refused")
    assert host.start_failures == 0
    assert "Its code takes more than 4 GB when unpacked. Change it" in run_message(fresh(run))


def test_a_fault_of_a_newer_runner_is_worded_too(run: Run, runner: Runner) -> None:
    runner.claim()
    runner.post("exit", {"reason": "code_refused", "code_refused": {"fault": "too_odd", "name": "a\0b"}})
    assert "Its host refused its code." in run_message(fresh(run))


def test_a_token_authenticates_only_its_own_job(run: Run, project: Project, member: User) -> None:
    other = make_run(project, member)
    place_all()
    job, foreign = placed_job(run), placed_job(other)
    assert Runner(job, token=job_token(foreign.pk)).claim().status_code == 403
    assert Runner(job, token="nonsense").claim().status_code == 401


def test_a_runner_learns_nothing_about_its_job_before_the_claim(runner: Runner) -> None:
    assert [runner.get("spec").status_code, runner.post("started").status_code] == [409, 409]


def test_log_bytes_are_addressed_by_offset(run: Run, runner: Runner) -> None:
    runner.claim()
    assert runner.log(0, b"abc\xff").json() == {"next": 4}
    assert runner.log(2, b"c\xffde").json() == {"next": 6}
    gap = runner.log(10, b"x")
    assert (gap.status_code, gap.json()["expected"]) == (409, 6)
    assert runner.log(0, b"ABC").json() == {"next": 6}


def test_marks_come_before_the_logs_bytes_and_continue_at_their_own_offset(run: Run, runner: Runner) -> None:
    runner.claim()
    job, first, second = placed_job(run).pk, b"1" * 16, b"2" * 32
    assert runner.log(0, first + b"one\n", "&marks=0&marks_size=16").json() == {"next": 4, "marks": 16}
    assert runner.log(4, second + b"two\n", "&marks=16&marks_size=32").json() == {"next": 8, "marks": 48}
    assert runner.log(4, second + b"two\n", "&marks=16&marks_size=32").json() == {"next": 8, "marks": 48}  # once more
    behind = runner.log(9, second + b"x", "&marks=480&marks_size=32")
    assert (behind.status_code, behind.json()["expected"], behind.json()["marks"]) == (409, 8, 48)
    assert logs.read_log(job, 0, 100) == b"one\ntwo\n"
    assert logs.marks(job, 0) == first + second
    logs.remove_log(job)
    assert logs.marks(job, 0) == b""


def test_marks_are_whole_and_their_number_is_bounded(run: Run, runner: Runner) -> None:
    runner.claim()
    assert runner.log(0, b"1" * 15, "&marks=0&marks_size=15").status_code == 422
    most = logs.MARKS_MOST
    answer = runner.log(0, b"1" * 16 + b"x", f"&marks={most}&marks_size=16")
    assert answer.json() == {"next": 1, "marks": most + 16}
    assert logs.marks(placed_job(run).pk, 0) == b""


def test_a_log_over_the_quota_is_cut_and_the_job_goes_on(run: Run, runner: Runner, settings: LazySettings) -> None:
    runner.claim()
    settings.DSTACKWEB_PROJECT_LOG_GB = 0
    assert runner.log(0, b"abc").json() == {"next": 3, "cut": "project_quota"}
    assert runner.log(3, b"def").json() == {"next": 6, "cut": "project_quota"}
    assert runner.post("heartbeat", {"beat": 1}).json()["action"] == "go"


def test_a_heartbeat_carries_the_stop_request_with_its_grace(run: Run, runner: Runner, member: User) -> None:
    runner.claim()
    runner.post("started")
    assert runner.post("heartbeat", {"beat": 1}).json()["action"] == "go"
    stop(fresh(run), member, "member")
    answer = runner.post("heartbeat", {"beat": 2}).json()
    assert (answer["action"], answer["reason"]) == ("stop", "terminated_by_user")
    assert answer["grace_s"] > 0
    runner.post("exit", {"exit_code": 143, "reason": "container_exited_with_error"})
    assert (fresh(run).status, fresh(run).termination_reason) == ("terminated", "stopped_by_user")
    assert runner.post("heartbeat", {"beat": 3}).status_code == 409


def test_a_job_has_exited_from_the_first_heartbeat_that_says_so(run: Run, runner: Runner) -> None:
    runner.claim()
    runner.post("started")
    runner.post("heartbeat", {"beat": 1, "phase": "exited"})
    first = Job.objects.get(run=run).exited_at
    assert first is not None
    runner.post("heartbeat", {"beat": 2, "phase": "exited"})
    assert Job.objects.get(run=run).exited_at == first


def test_nodes_wait_for_each_other_before_they_start(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, nodes=2)
    place_all()
    first, second = Runner(placed_job(run, 0), "a"), Runner(placed_job(run, 1), "b")
    first.claim()
    assert first.post("heartbeat", {"beat": 1, "phase": "waiting"}).json()["action"] == "wait"
    second.claim()
    assert first.post("heartbeat", {"beat": 2, "phase": "waiting"}).json()["action"] == "go"
    assert first.get("spec").json()["nodes"] == 2


def test_nodes_start_together_once_the_last_of_them_has_its_image(project: Project, member: User) -> None:
    make_host(engine={"name": "docker", "code": ""})
    run = make_run(project, member, nodes=2, image="tool:1")
    place_all()
    first, second = Runner(placed_job(run, 0), "a"), Runner(placed_job(run, 1), "b")
    first.claim()
    second.claim()
    second.post("heartbeat", {"beat": 1, "phase": "pulling"})
    assert first.post("heartbeat", {"beat": 1, "phase": "waiting"}).json()["action"] == "wait"
    as_if(Job.objects.filter(run=run), status_s=1000)
    assert first.post("heartbeat", {"beat": 2, "phase": "waiting"}).json()["action"] == "wait"
    assert Job.objects.timed().get(run=run, node=0).status_s == 0  # a pull may take longer than a start
    assert second.post("heartbeat", {"beat": 2, "phase": "waiting"}).json()["action"] == "go"
    assert first.post("heartbeat", {"beat": 3, "phase": "waiting"}).json()["action"] == "go"


def test_a_pull_that_fails_ends_the_wait_of_all_nodes_and_the_run_names_its_node(
    project: Project, member: User
) -> None:
    make_host(engine={"name": "docker", "code": ""})
    run = make_run(project, member, nodes=2, image="tool:1")
    place_all()
    first, second = Runner(placed_job(run, 0), "a"), Runner(placed_job(run, 1), "b")
    first.claim()
    second.claim()
    assert first.post("heartbeat", {"beat": 1, "phase": "waiting"}).json()["action"] == "wait"
    failed = {"fault": "not_found", "image": "tool:1"}
    second.post("exit", {"reason": "image_pull_failed", "image_pull_failed": failed})
    answer = first.post("heartbeat", {"beat": 2, "phase": "waiting"}).json()
    assert (answer["action"], answer["reason"]) == ("stop", "terminated_by_server")
    first.post("exit", {"reason": "terminated_by_server"})
    ended = fresh(run)
    assert (ended.status, ended.status_detail["code"]) == ("failed", "image_pull_failed")
    assert run_message(ended) == "Node 1: The registry has no image tool:1. Check its name and tag."


def test_secrets_reach_the_runner_and_are_named_for_masking(project: Project, member: User) -> None:
    make_host()
    set_secret(project, "HF", "hunter2hunter2", member)
    body = Submission(
        {"type": "task", "commands": ["a"], "env": ["A=${{ secrets.HF }}", "B"]}, env={"B": "clientvalue"}
    )
    run, _made = submit(project, member, "member", body)
    place_all()
    runner = Runner(placed_job(run))
    runner.claim()
    spec = runner.get("spec").json()
    assert spec["env"] == {"A": "hunter2hunter2", "B": "clientvalue"}
    assert set(spec["redact"]) == {"hunter2hunter2", "clientvalue", spec["tasks"]["token"]}


def test_a_secret_that_is_replaced_while_a_job_has_it_is_masked_still(project: Project, member: User) -> None:
    make_host()
    set_secret(project, "HF", "hunter2hunter2", member)
    run = make_run(project, member, env={"A": "${{ secrets.HF }}"})
    place_all()
    runner = Runner(placed_job(run))
    runner.claim()
    set_secret(project, "HF", "hunter3hunter3", member)
    for _ in range(2):
        assert {"hunter2hunter2", "hunter3hunter3"} < set(runner.get("spec").json()["redact"])
    assert "hunter" not in placed_job(run).secrets_held
    shown = {"events": [{"key": "a-1", "state": "failed", "seq": 1, "message": "hunter2hunter2 hunter3hunter3"}]}
    runner.post("tasks", shown)
    assert TaskFailure.objects.get().message == f"{'*' * 14} {'*' * 14}"
    runner.post("exit", {"exit_code": 0, "reason": "done_by_runner", "log_size": 0})
    assert placed_job(run).secrets_held == ""


def test_a_secret_deleted_after_the_start_is_masked_and_ends_nothing(project: Project, member: User) -> None:
    make_host()
    set_secret(project, "HF", "hunter2hunter2", member)
    run = make_run(project, member, env={"A": "${{ secrets.HF }}"})
    place_all()
    runner = Runner(placed_job(run))
    runner.claim()
    runner.post("started")
    delete_secret(project, "HF")
    spec = runner.claim().json()["spec"]
    assert "hunter2hunter2" in spec["redact"]
    assert (fresh(run).status, spec["env"]) == ("running", {"A": ""})


def test_a_secret_deleted_before_the_start_fails_the_run_with_its_name(project: Project, member: User) -> None:
    make_host()
    set_secret(project, "HF", "hunter2hunter2", member)
    run = make_run(project, member, env={"A": "${{ secrets.HF }}"})
    place_all()
    delete_secret(project, "HF")
    runner = Runner(placed_job(run))
    runner.claim()
    assert runner.get("spec").status_code == 409
    assert fresh(run).status == "failed"
    assert "HF" in fresh(run).status_message


def test_a_heartbeat_takes_two_statements(run: Run, runner: Runner, django_assert_num_queries: Any) -> None:
    runner.claim()
    runner.post("started")
    with django_assert_num_queries(2):
        assert runner.post("heartbeat", {"beat": 1}).json()["action"] == "go"


def heartbeats(*runners: Runner) -> dict[str, Any]:
    """What one request for all of them is answered."""
    body = {"jobs": [{"token": runner.token, "nonce": runner.nonce} for runner in runners]}
    answer = Client().post("/api/v1/runner/jobs/heartbeats", body, content_type="application/json")
    assert answer.status_code == 200, answer.content
    found: dict[str, Any] = answer.json()["jobs"]
    return found


def test_all_jobs_of_a_host_take_as_many_statements_as_two(project: Project, member: User) -> None:
    make_host(cpus=64, memory_gib=512)
    runs = [make_run(project, member) for _ in range(20)]
    place_all()
    runners = [Runner(placed_job(run)) for run in runs]
    for runner in runners:
        runner.claim()
        runner.post("started")
    counted = []
    for some in (runners[:2], runners):
        with CaptureQueriesContext(connection) as queries:
            assert [answer["action"] for answer in heartbeats(*some).values()] == ["go"] * len(some)
        counted.append(len(queries))
    assert counted[0] == counted[1] <= 4  # with the transaction's begin and end


def test_of_many_heartbeats_each_is_answered_for_its_own_job(project: Project, member: User) -> None:
    make_host()
    runs = [make_run(project, member) for _ in range(4)]
    place_all()
    going, stopping, ended, foreign = (Runner(placed_job(run)) for run in runs)
    for runner in (going, stopping, ended, foreign):
        runner.claim()
        runner.post("started")
    stop(fresh(runs[1]), member, "member")
    ended.post("exit", {"exit_code": 0, "reason": "done_by_runner", "log_size": 0})
    foreign.nonce = "another's"
    unknown = Runner(placed_job(runs[0]), token="nonsense")
    answers = heartbeats(going, stopping, ended, foreign, unknown)
    actions = {pk: answer["action"] for pk, answer in answers.items()}
    assert actions == {str(placed_job(runs[0]).pk): "go", str(placed_job(runs[1]).pk): "stop"}
    assert answers[str(placed_job(runs[1]).pk)]["grace_s"] > 0
