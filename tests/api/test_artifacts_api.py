"""From a runner's upload to what a person lists and downloads, over the API alone."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import urlencode

import pytest
from django.conf import LazySettings
from django.http import HttpResponse
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import create_token
from dstackweb.runs.models import Job, Run
from tests.api.test_runner_api import Runner
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job

pytestmark = pytest.mark.django_db
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


@pytest.fixture
def run(project: Project, member: User) -> Run:
    make_host()
    run = make_run(project, member, name="train")
    place_all()
    return run


@pytest.fixture
def runner(run: Run) -> Runner:
    runner = Runner(placed_job(run))
    runner.claim()
    runner.post("started")
    return runner


@pytest.fixture
def api(project: Project) -> Client:
    viewer = join(project, make_user(), "viewer")
    return Client(headers={"Authorization": f"Bearer {create_token(viewer, 'test')[1]}"})


def send(runner: Runner, path: str, data: bytes, offset: int = 0, **about: Any) -> HttpResponse:
    query = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "offset": offset} | about
    url = f"{runner.base}/artifacts?{urlencode(query)}"
    return Client().post(url, data[offset:], content_type="application/octet-stream", headers=runner.headers)


def content(answer: Any) -> bytes:
    return b"".join(answer.streaming_content)


def file(api: Client, path: str, more: str = "", **headers: str) -> Any:
    address = f"/api/v1/projects/main/runs/train/artifacts/file?{urlencode({'path': path})}{more}"
    return api.get(address, headers=headers)


def test_the_spec_says_what_may_be_left_unless_nothing_is_kept(runner: Runner, settings: LazySettings) -> None:
    assert runner.get("spec").json()["artifacts"] == {"file": 512 << 20, "files": 1000, "seconds": 600}
    settings.DSTACKWEB_RUN_ARTIFACTS_MB = 0
    assert runner.get("spec").json()["artifacts"] is None


def test_uploads_are_listed_and_downloaded(run: Run, runner: Runner, api: Client) -> None:
    assert send(runner, "plots/loss.png", PNG).json() == {"next": len(PNG), "done": True}
    half = send(runner, "big", b"0123456789", sha256=hashlib.sha256(b"0123456789").hexdigest())
    assert half.json()["done"]
    listed = api.get("/api/v1/projects/main/runs/train/artifacts").json()
    assert [(one["path"], one["node"], one["attempt"], one["size"]) for one in listed["items"]] == [
        ("big", 0, 1, 10),
        ("plots/loss.png", 0, 1, len(PNG)),
    ]
    assert listed["items"][1]["sha256"] == hashlib.sha256(PNG).hexdigest()
    assert (listed["next"], listed["left_out"], listed["left_out_number"]) == (None, [], 0)
    page = api.get("/api/v1/projects/main/runs/train/artifacts?limit=1").json()
    assert (len(page["items"]), page["next"]) == (1, "1")
    assert api.get("/api/v1/projects/main/runs/train/artifacts?limit=1&cursor=1").json()["items"][0]["size"] == len(PNG)
    assert content(file(api, "plots/loss.png")) == PNG


def test_a_file_is_saved_and_never_shown_or_sniffed(runner: Runner, api: Client) -> None:
    for name in ("page.html", "image.svg", "loss.png"):
        send(runner, name, b"<script>alert(1)</script>" if name != "loss.png" else PNG)
        answer = file(api, name)
        assert answer["Content-Type"] == "application/octet-stream"
        assert answer["Content-Disposition"] == f'attachment; filename="{name}"'
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert answer["Content-Security-Policy"] == "sandbox; default-src 'none'"


@pytest.mark.parametrize(
    ("asked", "status", "part", "where"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=-30", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=8-100", 206, b"89", "bytes 8-9/10"),
        ("bytes=10-", 416, b"", "bytes */10"),
        ("bytes=-0", 416, b"", "bytes */10"),
        ("bytes=4-2", 200, b"0123456789", None),
        ("bytes=0-1,4-5", 200, b"0123456789", None),
        ("lines=1-2", 200, b"0123456789", None),
        ("bytes=-", 200, b"0123456789", None),
        ("bytes=99999999999999999999-", 200, b"0123456789", None),
    ],
)
def test_a_download_goes_on_where_it_stopped(
    runner: Runner, api: Client, asked: str, status: int, part: bytes, where: str | None
) -> None:
    send(runner, "ten", b"0123456789")
    answer = file(api, "ten", Range=asked)
    assert (answer.status_code, content(answer), answer.get("Content-Range")) == (status, part, where)
    assert int(answer["Content-Length"]) == len(part)


def test_a_part_of_another_content_is_not_given(runner: Runner, api: Client) -> None:
    send(runner, "a", b"0123456789")
    etag = file(api, "a")["ETag"]
    assert file(api, "a", **{"Range": "bytes=5-", "If-Range": etag}).status_code == 206
    send(runner, "a", b"abcdefghij")
    assert content(file(api, "a", **{"Range": "bytes=5-", "If-Range": etag})) == b"abcdefghij"


def test_what_a_runner_could_not_send_is_kept_with_the_end(run: Run, runner: Runner, api: Client) -> None:
    left = [{"path": "big\x00", "why": "file_limit", "size": 1 << 40}, {"path": "x", "why": "kind", "size": None}]
    body = {"exit_code": 0, "reason": "done_by_runner", "artifacts": {"left_out": left, "number": 70}}
    assert runner.post("exit", body).status_code == 200
    found = api.get("/api/v1/projects/main/runs/train/artifacts").json()
    assert [(one["path"], one["why"], one["detail"]) for one in found["left_out"]] == [
        ("big?", "file_limit", "over the limit of 512 MB for a file"),
        ("x", "kind", "not a plain file"),
    ]
    assert found["left_out_number"] == 70


def test_an_end_with_other_reasons_is_refused(runner: Runner) -> None:
    left = [{"path": "x", "why": "<script>", "size": 1}]
    body = {"exit_code": 0, "reason": "done_by_runner", "artifacts": {"left_out": left, "number": 1}}
    assert runner.post("exit", body).status_code == 422


def test_only_the_jobs_own_runner_uploads_while_the_job_is_active(run: Run, runner: Runner) -> None:
    job = placed_job(run)
    assert send(Runner(job, "other-nonce"), "a", b"x").status_code == 409
    assert send(Runner(job, token="no-token"), "a", b"x").status_code == 401
    other = make_run(run.project, run.user)
    place_all()
    stranger = Runner(job)
    stranger.headers = Runner(placed_job(other)).headers
    assert send(stranger, "a", b"x").status_code == 403
    runner.post("exit", {"exit_code": 0, "reason": "done_by_runner"})
    assert send(runner, "a", b"x").status_code == 409
    assert not job.artifacts.exists()


@pytest.mark.parametrize(
    ("path", "about"),
    [
        ("../../etc/cron.d/x", {}),
        ("/etc/passwd", {}),
        ("a\nb", {}),
        ("x" * 2000, {}),
        ("a", {"size": -1}),
        ("a", {"size": 2**63}),
        ("a", {"sha256": "../" * 21 + "x"}),
        ("a", {"offset": -1}),
    ],
)
def test_hostile_uploads_are_refused(runner: Runner, path: str, about: dict[str, Any]) -> None:
    assert send(runner, path, b"x", **about).status_code == 422
    assert not Job.objects.get().artifacts.exists()


def test_a_gap_says_where_to_go_on(runner: Runner) -> None:
    answer = send(runner, "a", b"0123456789", offset=4)
    assert (answer.status_code, answer.json()["expected"]) == (409, 0)


def test_strangers_and_unknown_paths_get_nothing(runner: Runner, api: Client) -> None:
    send(runner, "a", b"x")
    assert file(api, "b").status_code == 404
    assert file(api, "a", "&attempt=2").status_code == 404
    assert file(api, "a", "&node=1").status_code == 404
    stranger = Client(headers={"Authorization": f"Bearer {create_token(make_user(), 'test')[1]}"})
    assert file(stranger, "a").status_code == 404
    assert stranger.get("/api/v1/projects/main/runs/train/artifacts").status_code == 404
