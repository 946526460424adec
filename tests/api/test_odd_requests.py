"""What no sensible client sends is refused with a 4xx, on every database; nothing is stored of it."""

from __future__ import annotations

import json

import pytest
from django.conf import LazySettings
from django.test import RequestFactory
from django.utils.translation import gettext_lazy
from pydantic import ValidationError

from dstackweb.accounts.models import Project, User
from dstackweb.api import app
from dstackweb.api.agents import PollIn
from dstackweb.api.runner_schemas import SamplesIn
from dstackweb.runs import logs, rows
from dstackweb.runs.launch import job_token
from dstackweb.runs.models import Job, Run
from tests.api.conftest import Api
from tests.factories import make_host, make_run, place_all, placed_job, start

HUGE = 10**30
TASK = {"type": "task", "commands": ["a"]}


@pytest.mark.parametrize(
    "path",
    [
        "projects/main/runs/%00",
        "projects/%00/runs",
        "projects/main/runs?q=%00",
        "projects/main/runs?user=%00",
        f"projects/main/runs?cursor={HUGE}",
        f"projects/main/runs?cursor=-{HUGE}",
        "projects/main/queues/%00",
        f"projects/main/queues/default?cursor={HUGE}",
        f"projects/main/runs/hello/logs?offset={HUGE}",
        "projects/main/runs/hello/logs?offset=17736161082999",  # more than ext4 has in a file
        f"projects/main/runs/hello/logs?offset={2**62 - 1}",
        f"projects/main/runs/hello/logs?node={HUGE}",
        f"projects/main/runs/hello/logs?attempt={HUGE}",
        f"projects/main/runs?{'status=done&' * 3000}",
    ],
)
def test_an_address_that_no_database_can_hold_is_refused(api: Api, project: Project, member: User, path: str) -> None:
    make_host()
    run = make_run(project, member, "hello")
    place_all()
    logs.append_log(start(placed_job(run)).pk, 0, b"hello")
    assert api("GET", path).status_code < 500


@pytest.mark.parametrize(
    "body",
    [
        {"config": "type: task\ncommands: [a]\nname: a\0b\n"},
        {"config": TASK | {"commands": ["echo \0"]}},
        {"config": TASK | {"env": {"A": "\0"}}},
        {"config": TASK | {"env": ["A"]}, "env": {"A": "\0"}},
        {"config": TASK | {"working_dir": "\0"}},
        {"config": TASK | {"queue": "\0"}},
        {"config": TASK | {"profile": "\0"}},
        {"config": TASK | {"image": "a\0"}},
        {"config": TASK | {"regions": ["\0"]}},
        {"config": TASK, "overrides": {"queue": "\0"}},
        {"config": TASK, "archive": "\0"},
        {"config": TASK | {"priority": HUGE}},
        {"config": TASK | {"nodes": HUGE}},
        {"config": TASK | {"commands": ["\ud800"]}},
    ],
)
def test_a_run_file_that_no_database_can_hold_is_refused(api: Api, body: dict) -> None:
    for path in ("projects/main/runs/plan", "projects/main/runs"):
        answer = api("POST", path, body)
        assert 400 <= answer.status_code < 500, answer.content
    assert not Run.objects.exists()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("queues/default/move", {"run": "\ud800", "top": True}),
        ("queues/default/move", {"run": "hello", "before": "\ud800"}),
        ("holds", {"for": "1h", "cpu": "1", "name": "\ud800"}),
        ("runs", {"config": TASK | {"queue": "\ud800"}}),
    ],
)
def test_half_a_character_is_refused(api: Api, project: Project, member: User, path: str, body: dict) -> None:
    make_run(project, member, "hello")
    answer = api("POST", f"projects/main/{path}", body)
    assert 400 <= answer.status_code < 500, answer.content
    assert Run.objects.count() == 1


def test_an_internal_error_is_answered_in_the_apis_form_and_logged(
    api: Api, project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rows, "queue_rows", fail)
    answer = api("GET", "projects/main/queues/default")
    assert (answer.status_code, "Internal server error" in answer.json()["detail"]) == (500, True)
    assert "ZeroDivisionError" in caplog.text


def test_an_answer_may_repeat_half_a_character_and_lazy_words(rf: RequestFactory) -> None:
    answer = app.api.create_response(rf.get("/"), {"detail": "\ud800", "hint": gettext_lazy("Queue")}, status=422)

    assert json.loads(answer.content) == {"detail": "\ud800", "hint": "Queue"}


def test_what_is_no_data_is_no_answer(rf: RequestFactory) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        app.api.create_response(rf.get("/"), {"run": object()}, status=200)


@pytest.mark.parametrize(
    "path", ["projects/main/runs", "projects/main/runs/hello/tasks", "runner/jobs/{}/logs?offset=0"]
)
def test_a_body_that_is_too_large_is_refused(
    api: Api, project: Project, member: User, settings: LazySettings, path: str
) -> None:
    make_host()
    run = make_run(project, member, "hello")
    place_all()
    job = start(placed_job(run))
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 4 << 20
    own = {"Authorization": f"Bearer {job_token(job.pk)}", "X-Nonce": "nonce"} if path.startswith("runner") else {}
    answer = api("POST", path.format(job.pk), {"config": "x" * (4 << 20)}, **own)
    assert (answer.status_code, answer.json()) == (413, {"detail": "a request can have at most 4 MiB"})


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PUT", "projects/main/runs/hello", {"GET", "PATCH", "DELETE"}), ("PUT", "hosts", {"GET"})],
)
def test_an_unsupported_method_is_refused_in_the_apis_form(api: Api, method: str, path: str, allowed: set[str]) -> None:
    answer = api(method, path)
    assert (answer.status_code, set(answer["Allow"].split(", "))) == (405, allowed)
    assert method in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("claim", {"nonce": ""}),
        ("claim", {"nonce": "n" * 65}),
        ("claim", {"nonce": "\0"}),
        ("exit", {"reason": "r" * 61}),
        ("exit", {"reason": "executor_error", "exit_code": HUGE}),
        ("exit", {"reason": "executor_error", "log_size": HUGE}),
        ("exit", {"reason": "executor_error", "log_size": -1}),
        ("logs?offset=-1", {}),
    ],
)
def test_a_malformed_request_of_a_runner_is_refused(
    api: Api, project: Project, member: User, path: str, body: dict
) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job = placed_job(run)
    headers = {"Authorization": f"Bearer {job_token(job.pk)}", "X-Nonce": "nonce"}
    if not path.startswith("claim"):
        start(job)
    answer = api("POST", f"runner/jobs/{job.pk}/{path}", body, **headers)
    assert 400 <= answer.status_code < 500, answer.content
    assert Job.objects.get().status == ("provisioning" if path.startswith("claim") else "running")
    assert Job.objects.get().claim_nonce == ("" if path.startswith("claim") else "nonce")


def test_a_message_with_any_byte_in_it_still_ends_the_job(api: Api, project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job = start(placed_job(run))
    headers = {"Authorization": f"Bearer {job_token(job.pk)}", "X-Nonce": "nonce"}
    body = {"reason": "executor_error", "message": "not found: a\0b \ud800"}
    assert api("POST", f"runner/jobs/{job.pk}/exit", body, **headers).status_code == 200
    assert Run.objects.get().status == "failed"


def test_only_the_runner_that_claimed_a_job_ends_it(api: Api, project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job, token = placed_job(run), {"Authorization": f"Bearer {job_token(placed_job(run).pk)}"}
    end = {"reason": "done_by_runner", "exit_code": 0}
    assert api("POST", f"runner/jobs/{job.pk}/exit", end, **token, X_Nonce="nonce").status_code == 409
    start(job)
    assert api("POST", f"runner/jobs/{job.pk}/exit", end, **token).status_code == 409
    assert api("POST", f"runner/jobs/{job.pk}/exit", end, **token, X_Nonce="other").status_code == 409
    assert Run.objects.get().status == "running"
    assert api("POST", f"runner/jobs/{job.pk}/exit", end, **token, X_Nonce="nonce").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"config": "a", **{f"key-{number:06}": 1 for number in range(10_001)}},
        {"config": "a", "env": {f"A{number:06}": 1 for number in range(10_001)}},
    ],
    ids=["unknown", "wrong"],
)
def test_an_object_of_very_many_keys_is_refused_before_each_is_an_error(api: Api, body: dict) -> None:
    """400,000 errors took hundreds of megabytes, and any token of a project may be refused so."""
    answer = api("POST", "projects/main/runs/plan", body)
    assert (answer.status_code, "more than 10,000 keys" in answer.json()["detail"]) == (422, True)


def test_an_answer_lists_the_first_errors(api: Api) -> None:
    body = {"config": "a", **{f"k{number}": 1 for number in range(2000)}}
    answer = api("POST", "projects/main/runs/plan", body)
    assert (answer.status_code, len(answer.json()["errors"])) == (422, 50)


def test_samples_stop_at_the_first_error() -> None:
    """A body has room for a million GPUs and processes that are none, and each would become an error."""
    gpus = [{"processes": [{}] * 64}] * 64
    for schema in (SamplesIn, PollIn):
        with pytest.raises(ValidationError) as refused:
            schema.model_validate({"jobs": {}, "samples": [{"age_s": 1, "gpus": gpus}] * 100})
        assert refused.value.error_count() < 5
