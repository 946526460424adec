"""Reports of the tasks inside a run: who may, of which attempt, and what is answered."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import F
from django.http import HttpResponse
from django.test import Client

from dstackweb.accounts.models import Project, ProjectSecret, User
from dstackweb.accounts.services import set_secret
from dstackweb.api import tasks
from dstackweb.api.tasks import Gate
from dstackweb.lib.errors import TooMany
from dstackweb.progress.models import Reporter, Scope, Task, TaskFailure, TaskGroup, TaskPrefix
from dstackweb.progress.reports import MESSAGE_MAX
from dstackweb.runs.launch import job_token, tasks_token
from dstackweb.runs.models import Run
from dstackweb.runs.services import Submission, submit
from dstackweb.runs.states import RunStatus
from tests.api.conftest import Api
from tests.api.test_runner_api import Runner
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

DONE = {"events": [{"key": "train-1", "state": "done", "seq": 5}]}


@pytest.fixture(autouse=True)
def own_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have reported is not counted here."""
    monkeypatch.setattr(tasks, "gate", Gate(4, 50_000, 100_000))


@pytest.fixture
def run(project: Project, member: User) -> Run:
    make_host()
    run = make_run(project, member, "search")
    place_all()
    start(placed_job(run))
    return Run.objects.get(pk=run.pk)


class Commands:
    """What a job's commands report, with the token that they find."""

    def __init__(self, run: Run) -> None:
        self.url = f"/api/v1/projects/main/runs/{run.uid}/tasks"
        self.headers = {"Authorization": f"Bearer {tasks_token(placed_job(run).pk)}"}

    def report(self, body: Any, url: str = "") -> HttpResponse:
        return Client().post(url or self.url, body, content_type="application/json", headers=self.headers)


@pytest.fixture
def commands(run: Run) -> Commands:
    return Commands(run)


def states(run: Run) -> dict[str, int]:
    scope = Scope.objects.get(run_id=run.pk, attempt=run.attempt)
    return {name: n for name in ("memory", "erred", "released", "processing", "waiting") if (n := getattr(scope, name))}


def refused(answer: HttpResponse) -> tuple[str, int]:
    """Why, and the run's attempt."""
    assert answer.status_code == 409
    return answer.json()["reason"], answer.json()["attempt"]


def ended(run: Run) -> None:
    Runner(placed_job(run), "nonce").post("exit", {"exit_code": 0, "reason": "done_by_runner", "log_size": 0})


def test_commands_report_tasks_of_their_own_run(run: Run, commands: Commands) -> None:
    answer = commands.report(DONE)
    assert (answer.status_code, answer.json()) == (200, {"attempt": 1, "applied": 1, "outdated": 0, "refused": []})
    assert commands.report(DONE).json() == {"attempt": 1, "applied": 0, "outdated": 1, "refused": []}
    assert states(run) == {"memory": 1}
    assert Reporter.objects.get().name == "job-0"
    assert TaskPrefix.objects.get(scope__run_id=run.pk).name == "train"


def test_a_member_reports_tasks_of_a_run_by_name_or_id(api: Api, run: Run) -> None:
    assert api("POST", "projects/main/runs/search/tasks", DONE).status_code == 200
    assert api("POST", f"projects/main/runs/{run.uid}/tasks", DONE).json()["outdated"] == 1
    assert Reporter.objects.get().name == "user-ada"


def test_an_empty_request_is_a_heartbeat_of_its_reporter(run: Run, commands: Commands) -> None:
    promise = {"reporter": "r", "heartbeat_s": 15}
    assert commands.report(promise | DONE).status_code == 200
    before = Scope.objects.values().get(run_id=run.pk)
    Reporter.objects.update(last_ms=1, due_ms=2)
    assert commands.report(promise).json() == {"attempt": 1, "applied": 0, "outdated": 0, "refused": []}
    reporter = Reporter.objects.get()
    assert reporter.due_ms == reporter.last_ms + 45_000
    assert Scope.objects.values().get(run_id=run.pk) == before
    commands.report({"reporter": "r", "seq": 9, "ended": True})
    assert Reporter.objects.get().due_ms is None
    assert commands.report(promise | {"heartbeat_s": 0}).status_code == 422


@pytest.fixture
def secretive(project: Project, member: User) -> Run:
    """A placed run with a secret of its project and a value of its client's shell."""
    make_host()
    set_secret(project, "HF", "hunter2-hunter2", member)
    env = ["HF=${{ secrets.HF }}", "KEY"]
    config = {"type": "task", "name": "search", "commands": ["true"], "env": env}
    submit(project, member, "member", Submission(config, {"KEY": "client/value"}))
    place_all()
    run = Run.objects.get()
    start(placed_job(run))
    return run


def test_messages_of_tasks_have_no_secrets(secretive: Run) -> None:
    commands = Commands(secretive)
    token = commands.headers["Authorization"].split()[1]
    in_base64 = base64.b64encode(b"hunter2-hunter2").decode()
    result = f"HF=hunter2-hunter2, {in_base64}, client%2Fvalue, {token}; plain ü"
    commands.report({"events": [{"key": "a-1", "state": "running", "seq": 1, "message": result}]})
    commands.report({"events": [{"key": "a-2", "state": "failed", "seq": 2, "message": result}]})
    failures = [{"key": "b-1", "prefix": "b", "group": "b", "seq": 3, "message": result}]
    commands.report({"reporter": "r", "failures": failures})
    shown = f"HF={'*' * 15}, {'*' * 20}, {'*' * 14}, {'*' * len(token)}; plain ü"
    messages = [*TaskFailure.objects.values_list("message", flat=True), Task.objects.get(key="a-1").message]
    assert messages == [shown] * 3


def test_names_of_tasks_have_no_secrets(secretive: Run) -> None:
    commands, stars = Commands(secretive), "*" * 15
    events = [
        {"key": "train-hunter2-hunter2-1", "state": "done", "seq": 1},
        {"key": "hunter2-hunter2", "state": "done", "seq": 2},
        {"key": "fit-1", "prefix": "fit", "group": "HF=hunter2-hunter2", "state": "done", "seq": 3},
    ]
    counts = [{"prefix": "üü hunter2-hunter2", "group": "g", "seq": 4, "states": {"done": 1}}]
    result = {"reporter": "of hunter2-hunter2", "events": events, "counts": counts}
    assert commands.report(result).json()["applied"] == 4
    assert Reporter.objects.get().name == f"of {stars}"
    assert set(Task.objects.values_list("key", flat=True)) == {f"train-{stars}-1", stars, "fit-1"}
    groups = TaskGroup.objects.exclude(name="search")  # the run's own
    assert set(groups.values_list("prefix__name", "name")) == {
        ("train", "train"), (stars, stars), ("fit", f"HF={stars}"), (f"üü {stars}", "g"),
    }  # fmt: skip


def test_reports_to_an_ended_run_are_refused_before_its_secrets_are_read(
    secretive: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, read = Commands(secretive), list[Run]()
    Run.objects.update(status="done")
    monkeypatch.setattr("dstackweb.api.tasks.masker", read.append)
    answer = commands.report({"events": [{"key": "a-1", "state": "failed", "seq": 1, "message": "no memory"}]})
    assert (answer.status_code, read) == (409, [])


def test_a_secret_at_a_messages_cut_shows_no_beginning(secretive: Run) -> None:
    result = "x" * (MESSAGE_MAX - 9) + "hunter2-hunter2"
    Commands(secretive).report({"events": [{"key": "a-1", "state": "failed", "seq": 1, "message": result}]})
    assert TaskFailure.objects.get().message == "x" * (MESSAGE_MAX - 9) + "*" * 9


def test_without_the_secrets_no_message_is_shown(secretive: Run) -> None:
    ProjectSecret.objects.update(ciphertext="of another key")
    commands = Commands(secretive)
    answer = commands.report(
        {"events": [{"key": "hunter2-hunter2-1", "state": "failed", "seq": 1, "message": "hunter2-hunter2"}]}
    )
    assert (answer.json()["applied"], TaskFailure.objects.get().message) == (1, "")
    assert "hunter2" not in TaskFailure.objects.get().key


def test_counts_failures_and_the_end_of_a_reporter_are_stored(run: Run, commands: Commands) -> None:
    counts = [{"prefix": "fit", "group": "fit-a", "seq": 1, "states": {"done": 3, "failed": 1, "waiting": 6}}]
    failures = [{"key": "fit-7", "prefix": "fit", "group": "fit-a", "seq": 1, "message": "no memory"}]
    commands.report({"reporter": "r", "counts": counts, "failures": failures})
    assert states(run) == {"memory": 3, "erred": 1, "waiting": 6}
    assert TaskFailure.objects.get().message == "no memory"
    commands.report({"reporter": "r", "seq": 2, "ended": True})
    assert states(run) == {"memory": 3, "erred": 1, "released": 6}


def test_an_invalid_entry_does_not_affect_the_others(run: Run, commands: Commands) -> None:
    events = [{"key": "a", "state": "exploded"}, {"key": "b", "state": "done"}, {"key": "", "state": "done"}, 7]
    body = commands.report({"events": events, "counts": [{"prefix": "p", "states": {"done": -1}}]}).json()
    assert body["applied"] == 1
    result = [(one["list"], one["index"], one["key"], one["reason"]) for one in body["refused"]]
    assert result == [
        ("events", 0, "a", "unknown_state"), ("events", 2, "", "bad_key"), ("events", 3, "", "malformed"),
        ("counts", 0, "p", "malformed"),
    ]  # fmt: skip


def test_invalid_entries_are_refused_by_their_position_in_the_request(run: Run, commands: Commands) -> None:
    commands.report({"events": [{"key": "a", "state": "forgotten", "seq": 1}]})
    events = [{"key": "z", "state": "odd"}, {"key": "b", "state": "done"}, {"key": "a", "state": "done", "seq": 2}]
    refused = commands.report({"events": events}).json()["refused"]
    assert [(one["index"], one["key"], one["reason"]) for one in refused] == [
        (0, "z", "unknown_state"), (2, "a", "forgotten"),
    ]  # fmt: skip


def test_the_token_of_a_runs_commands_gives_no_other_access(project: Project, member: User, commands: Commands) -> None:
    other = make_run(project, member, "other")
    place_all()
    assert commands.report(DONE, f"/api/v1/projects/main/runs/{other.uid}/tasks").status_code == 403
    for path in ("projects", "projects/main/runs", f"projects/main/runs/{other.uid}"):
        assert Client().get(f"/api/v1/{path}", headers=commands.headers).status_code == 401
    job = placed_job(other)
    claim = Client().post(
        f"/api/v1/runner/jobs/{job.pk}/claim", {"nonce": "n"}, content_type="application/json",
        headers={"Authorization": f"Bearer {tasks_token(job.pk)}"},
    )  # fmt: skip
    assert claim.status_code == 401
    commands.headers = {"Authorization": f"Bearer {job_token(job.pk)}"}
    assert commands.report(DONE).status_code == 401


def test_viewers_and_strangers_cannot_report_tasks(project: Project, run: Run, stranger: Api) -> None:
    viewer = Api(join(project, make_user("vera"), "viewer"))
    assert viewer("POST", "projects/main/runs/search/tasks", DONE).status_code == 403
    assert stranger("POST", "projects/main/runs/search/tasks", DONE).status_code == 404
    assert Api(None)("POST", "projects/main/runs/search/tasks", DONE).status_code == 401


def test_reports_are_accepted_only_for_the_current_attempt_and_not_after_the_run(
    api: Api, run: Run, commands: Commands
) -> None:
    assert api("POST", "projects/main/runs/search/tasks", DONE | {"attempt": 1}).status_code == 200
    assert refused(api("POST", "projects/main/runs/search/tasks", DONE | {"attempt": 2})) == ("not_yet", 1)
    ended(run)
    assert refused(commands.report(DONE)) == ("run_over", 1)
    assert refused(api("POST", "projects/main/runs/search/tasks", DONE)) == ("run_over", 1)


def test_a_late_report_of_an_earlier_attempt_is_refused(run: Run, commands: Commands) -> None:
    Run.objects.filter(pk=run.pk).update(attempt=2)
    answer = commands.report(DONE)
    assert refused(answer) == ("attempt_over", 2)
    assert "attempt 1 has ended" in answer.json()["detail"]
    assert not Scope.objects.filter(run_id=run.pk).exists()


def test_a_run_that_waits_has_no_tasks_yet(api: Api, project: Project, member: User) -> None:
    make_run(project, member, "waits")
    assert refused(api("POST", "projects/main/runs/waits/tasks", DONE)) == ("not_yet", 1)


def test_a_members_report_during_a_retry_counts_for_the_next_attempt_or_is_deferred(
    api: Api, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was read while its first attempt went on."""
    real = tasks.scope_for
    api("POST", "projects/main/runs/search/tasks", DONE)

    def retried(status: RunStatus) -> Callable[..., int]:
        def late(stale: Run, attempt: int | None = None) -> int:
            found = real(stale, attempt)
            monkeypatch.setattr(tasks, "scope_for", real)
            Scope.objects.filter(pk=found).update(ended_ms=1)
            Run.objects.filter(pk=run.pk).update(attempt=F("attempt") + 1, status=status)
            return found

        return late

    monkeypatch.setattr(tasks, "scope_for", retried(RunStatus.RUNNING))
    assert api("POST", "projects/main/runs/search/tasks", DONE).json()["attempt"] == 2
    monkeypatch.setattr(tasks, "scope_for", retried(RunStatus.PENDING))
    assert refused(api("POST", "projects/main/runs/search/tasks", DONE)) == ("not_yet", 3)


def test_a_request_of_another_form_is_refused_as_a_whole(api: Api, run: Run) -> None:
    bodies: list[Any] = [
        [], 7, "x", {"events": {}}, {"events": 1}, {"seq": "1"}, {"seq": -1}, {"seq": 2**53 + 1}, {"seq": True},
        {"reporter": ""}, {"reporter": "r" * 101}, {"reporter": "\0"}, {"reporter": "\ud800"}, {"ended": 1},
        {"attempt": 0}, {"attempt": "1"}, {"evnets": []},
    ]  # fmt: skip
    for body in bodies:
        assert api("POST", "projects/main/runs/search/tasks", body).status_code == 422, body
    assert not Scope.objects.filter(run_id=run.pk).exists()


def test_a_body_that_is_not_json_is_refused(api: Api, run: Run) -> None:
    url = "/api/v1/projects/main/runs/search/tasks"
    for raw in (b"", b"{", b"[" * 100_000, b"\xff", b'{"seq": 1e999}'):
        answer = api.client.generic("POST", url, raw, content_type="application/json", headers=api.headers)
        assert answer.status_code == 422, raw[:20]


def test_who_is_killed_amid_a_request_is_no_error_of_the_servers(api: Api, run: Run) -> None:
    class Cut:
        def read(self, *_size: int) -> bytes:
            raise ConnectionResetError

        readline = read

    more: dict[str, Any] = {"wsgi.input": Cut(), "headers": api.headers}
    answer = api.client.generic("POST", "/api/v1/projects/main/runs/search/tasks", b"{}", "application/json", **more)
    assert answer.status_code == 422
    assert not Scope.objects.filter(run_id=run.pk).exists()


def test_an_oversized_request_is_refused_with_the_limit(run: Run, commands: Commands) -> None:
    many = commands.report({"events": [{"key": "a", "state": "done"}] * 5001})
    assert (many.status_code, many.json()["most"]) == (413, 5000)
    large = commands.report({"events": [{"key": "a", "state": "done", "message": "x" * (4 << 20)}]})
    assert large.status_code == 413


def test_a_run_that_reports_too_often_gets_429_with_retry_after(
    monkeypatch: pytest.MonkeyPatch, run: Run, commands: Commands
) -> None:
    monkeypatch.setattr(tasks, "gate", Gate(4, rate=10, burst=60))
    assert commands.report(DONE).status_code == 200
    assert commands.report(DONE).status_code == 200
    answer = commands.report(DONE)
    assert answer.status_code == 429
    assert 1 <= int(answer["Retry-After"]) <= 6


def test_a_run_that_floods_with_nonsense_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, run: Run, commands: Commands, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "gate", Gate(4, rate=10, burst=60))
    nonsense = {"events": "x" * 100_000}
    assert commands.report(nonsense).status_code == 422
    monkeypatch.setattr(tasks, "parse_request", None)
    assert "Unprocessable" in caplog.text
    caplog.clear()
    answer = commands.report(nonsense)
    assert answer.status_code == 429
    assert not caplog.text  # which would fill a disk
    assert 9 <= int(answer["Retry-After"]) <= 10


def test_requests_beyond_the_concurrency_limit_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, run: Run, commands: Commands
) -> None:
    gate = Gate(3, 1000, 1000)
    monkeypatch.setattr(tasks, "gate", gate)
    with gate.enter(run.project_id), gate.enter(run.project_id):
        answer = commands.report(DONE)
    assert (answer.status_code, answer["Retry-After"]) == (429, "1")
    assert commands.report(DONE).status_code == 200


def test_a_runner_reports_the_task_lines_of_the_output(run: Run) -> None:
    job = placed_job(run)
    answer = Runner(job, "nonce").post("tasks", DONE)
    assert (answer.status_code, answer.json()["applied"]) == (200, 1)
    assert Reporter.objects.get().name == "log-0"
    assert Runner(job, "other").post("tasks", DONE).status_code == 409
    ended(run)
    assert Runner(job, "nonce").post("tasks", DONE).status_code == 409


def test_commands_get_a_report_address_with_the_runs_id(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member, "search")
    place_all()
    runner = Runner(placed_job(run))
    runner.claim()
    spec = runner.get("spec").json()
    assert spec["tasks"]["path"] == f"/api/v1/projects/main/runs/{run.uid}/tasks"
    assert spec["tasks"]["token"] in spec["redact"]
    headers = {"Authorization": f"Bearer {spec['tasks']['token']}"}
    assert (
        Client().post(spec["tasks"]["path"], DONE, content_type="application/json", headers=headers).json()["applied"]
    )


def test_a_scope_that_is_made_as_the_attempt_ends_is_refused(
    run: Run, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was read while it ran; it has ended before its scope is there."""
    from dstackweb.runs import launch

    real = launch.lock_run

    def late(run_id: int) -> Run:
        ended(run)
        return real(run_id)

    monkeypatch.setattr(launch, "lock_run", late)
    assert commands.report(DONE).status_code == 409
    assert not Scope.objects.filter(run_id=run.pk).exists()


class TestGate:
    def test_each_run_has_its_share_and_all_together_a_limit(self) -> None:
        gate = Gate(3, 1000, 1000)
        with gate.enter(1), gate.enter(1):
            with pytest.raises(TooMany), gate.enter(1):
                pass
            with gate.enter(2), pytest.raises(TooMany), gate.enter(3):
                pass
            with gate.enter(3):
                pass

    def test_one_run_leaves_a_place_for_others(self) -> None:
        gate = Gate(4, 1000, 1000)
        with gate.enter(1), gate.enter(1), gate.enter(1):
            with pytest.raises(TooMany), gate.enter(1):
                pass
            with gate.enter(2):
                pass

    def test_a_bucket_refills(self) -> None:
        gate = Gate(3, rate=100, burst=100)
        gate.spend(1, 10_000, 0)
        gate.owe(1, 140)
        with pytest.raises(TooMany) as refused:
            gate.spend(1, 1, 100_000)
        assert refused.value.retry_after == pytest.approx(1.0)
        gate.spend(1, 1, 1_100_000)
        gate.spend(2, 1, 100_000)

    def test_full_buckets_are_forgotten(self) -> None:
        gate = Gate(3, rate=1000, burst=100)
        for run_id in range(3000):
            gate.spend(run_id, 1, run_id * 1000)
        assert len(gate._buckets) <= 1001
