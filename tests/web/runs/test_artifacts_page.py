"""The artifacts on a run's page and their previews, which never run what a job wrote."""

from __future__ import annotations

import hashlib

import pytest
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import artifacts
from dstackweb.runs.artifacts import Offered
from dstackweb.runs.models import Job, RunArtifacts
from tests.factories import make_host, make_run, place_all, placed_job, start

pytestmark = pytest.mark.django_db
GIF = b"GIF89a" + bytes(20)
EVIL = b"<script>alert(1)</script>"


@pytest.fixture
def job(project: Project, member: User) -> Job:
    make_host()
    run = make_run(project, member, name="train")
    place_all()
    return start(placed_job(run))


@pytest.fixture
def client(member: User, job: Job) -> Client:
    client = Client()
    client.force_login(member)
    return client


def keep(job: Job, path: str, data: bytes) -> None:
    assert artifacts.take(job.pk, Offered(path, len(data), hashlib.sha256(data).hexdigest()), 0, data).done


def page(client: Client, what: str = "", path: str = "", **more: str) -> HttpResponse:
    return client.get(f"/p/main/runs/train/{what}", ({"path": path} if path else {}) | more)


def text(answer: HttpResponse) -> str:
    return answer.content.decode()


def test_the_section_is_there_once_there_is_something(client: Client, job: Job) -> None:
    assert 'id="run-artifacts"' not in text(page(client))
    keep(job, "plots/<b>.png", b"x" * 2048)
    shown = text(page(client))
    assert 'id="run-artifacts"' in shown
    assert "plots/&lt;b&gt;.png" in shown
    assert "2 KB" in shown
    assert "<b>.png" not in shown


def test_spaces_at_the_ends_of_a_name_are_shown(client: Client, job: Job) -> None:
    keep(job, " lead", b"1")
    keep(job, "lead", b"2")
    assert "␣lead" in text(page(client))
    assert "␣lead" in text(page(client, "artifacts/", " lead"))
    assert "␣" not in text(page(client, "artifacts/", "lead"))


def test_what_was_left_out_is_shown_with_its_reason(client: Client, job: Job) -> None:
    left = [{"path": "model.bin", "why": "file_limit", "size": 1 << 40}]
    artifacts.note_left_out(job.pk, left, 3)
    shown = text(page(client))
    assert "model.bin" in shown
    assert "over the limit of 512 MB for a file" in shown
    assert "and 2 more" in shown


def test_removed_artifacts_are_said(client: Client, job: Job) -> None:
    keep(job, "a", b"x")
    artifacts.forget(list(job.artifacts.all()), timezone.now())
    assert RunArtifacts.objects.get().removed_at
    assert "removed because they were old" in text(page(client))


@pytest.mark.parametrize("name", ["page.html", "image.svg", "fake.png", "notes.txt", "data.json"])
def test_text_is_escaped_whatever_its_name_says(client: Client, job: Job, name: str) -> None:
    keep(job, name, EVIL)
    shown = text(page(client, "artifacts/", name))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert EVIL.decode() not in shown
    answer = page(client, "artifacts/file/", name, shown="1")
    assert answer["Content-Type"] == "application/octet-stream"
    assert answer["Content-Disposition"].startswith("attachment")
    assert answer["Content-Security-Policy"] == "sandbox; default-src 'none'"
    assert answer["X-Content-Type-Options"] == "nosniff"


def test_pictures_are_shown_by_what_they_are(client: Client, job: Job) -> None:
    keep(job, "evil.html", GIF)
    shown = text(page(client, "artifacts/", "evil.html"))
    assert "<img" in shown
    assert "shown=1" in shown
    answer = page(client, "artifacts/file/", "evil.html", shown="1")
    assert (answer["Content-Type"], answer["X-Content-Type-Options"]) == ("image/gif", "nosniff")
    assert answer["Content-Security-Policy"] == "sandbox; default-src 'none'"
    assert answer["Content-Disposition"].startswith("inline")
    assert page(client, "artifacts/file/", "evil.html")["Content-Type"] == "application/octet-stream"


def test_of_a_table_the_first_rows_are_shown(client: Client, job: Job) -> None:
    keep(job, "m.csv", b"step,loss\n" + b"".join(b"%d,<i>\n" % number for number in range(500)))
    shown = text(page(client, "artifacts/", "m.csv"))
    assert '<th scope="col" class="dw-as-is">loss</th>' in shown
    assert shown.count("&lt;i&gt;") == 199
    assert "Only its beginning is shown" in shown


@pytest.mark.parametrize("table", [b"a," * 50 + b"a\n", b"a,b\n" + b"x" * 201 + b",1\n"], ids=["columns", "cells"])
def test_a_table_of_which_columns_or_cells_are_cut_says_so(client: Client, job: Job, table: bytes) -> None:
    keep(job, "m.csv", table)
    keep(job, "fits.csv", b"a," * 49 + b"a\n" + b"x" * 200 + b",1\n")
    assert "Only its beginning is shown" in text(page(client, "artifacts/", "m.csv"))
    assert "Only its beginning is shown" not in text(page(client, "artifacts/", "fits.csv"))


def test_the_byte_order_mark_of_a_spreadsheet_is_not_shown(client: Client, job: Job) -> None:
    keep(job, "m.csv", b"\xef\xbb\xbfstep,loss\n")
    assert '<th scope="col" class="dw-as-is">step</th>' in text(page(client, "artifacts/", "m.csv"))


def test_of_a_text_64_kib_are_shown(client: Client, job: Job) -> None:
    keep(job, "log", b"x" * 70_000 + b"END")
    shown = text(page(client, "artifacts/", "log"))
    assert "x" * 65536 in shown
    assert "END" not in shown
    assert "Only its beginning is shown" in shown


def test_other_files_are_only_downloaded(client: Client, job: Job) -> None:
    keep(job, "model", b"\x00\x01\x02")
    assert "No preview" in text(page(client, "artifacts/", "model"))
    assert b"".join(page(client, "artifacts/file/", "model")) == b"\x00\x01\x02"


def test_a_file_that_is_not_there_is_not_found(client: Client) -> None:
    for what in ("artifacts/", "artifacts/file/"):
        assert page(client, what, "../../secret_key").status_code == 404
        assert page(client, what).status_code == 404
