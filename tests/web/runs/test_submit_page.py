"""Submitting in the browser: the plan, errors beside the field, archives."""

from __future__ import annotations

import html
import io
import re
import tarfile
from collections.abc import Callable

import pytest
from django.conf import LazySettings
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.utils.html import strip_tags

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Archive, Run
from dstackweb.web.runs.submit_views import examples
from tests.factories import make_host, make_run, place_all
from tests.forms import open_form, submit
from tests.scheduler.passes.backend_offers_stub import StubMarket, offer
from tests.web.runs.actions import SUBMIT, show_plan, submit_file, submit_with_archive

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
HELLO = "type: task\nname: hello\ncommands:\n  - echo hello\n"


def packed() -> SimpleUploadedFile:
    """A small .tar.gz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("empty.txt"))
    return SimpleUploadedFile("code.tar.gz", buffer.getvalue(), "application/gzip")


def test_the_plan_shows_settings_offers_and_place_and_stores_nothing(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host("box-1", cpus=4, gpus=2)
    make_run(project, ann, "ahead")
    page = show_plan(as_user(ann), HELLO).content.decode()
    assert "Position 2 in queue default" in page
    assert "box-1" in page
    assert "idle" in page
    assert "profile default" in page
    assert not Run.objects.filter(name="hello").exists()


def test_the_plan_compares_backends_where_there_are_several(
    project: Project, ann: User, as_user: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host("box-1", gpus=1)
    browser, config = as_user(ann), HELLO + "resources: {gpu: 1}\nbackends: [hosts]\n"
    assert "plan-backends" not in show_plan(browser, config, scripts=False).content.decode()
    StubMarket(monkeypatch).has("cloud", offer("3.06"))
    make_run(project, ann, "ahead", resources={"gpu": 1})
    place_all()
    page = show_plan(browser, config).content.decode()
    shown = " ".join(strip_tags(page.partition('id="plan-backends"')[2].replace("<", " <")).split())
    assert "hosts capacity Needs 1 GPU, 0 of 1 free on box-1; 1 busy until" in shown
    assert "cloud Not used; add cloud to backends now $3.06/h" in shown


def test_the_plan_of_a_run_with_a_schedule_shows_when_it_enters_its_queue(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host("box-1")
    config = HELLO + "schedule: {cron: '0 2 * * *'}\n"
    page = show_plan(as_user(ann), config).content.decode()
    assert "Will wait for its schedule" in page
    assert "Enters queue default at <time" in page
    assert "Position" not in page


PIPELINE = f"{HELLO}---\ntype: task\nname: train\nafter: hello\ncommands: [train]\nresources: {{gpu: 1}}\n"


def test_a_file_with_several_runs_is_planned_and_submitted_as_a_whole(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host("box-1", gpus=1)
    browser = as_user(ann)
    page = show_plan(browser, PIPELINE).content.decode()
    runs = re.findall(r"<li.*?</li>", page.partition('id="plan-runs"')[2], re.DOTALL)
    assert [browser_text(run.replace("<", " <")) for run in runs] == [
        "hello 1 CPU Position 1 in queue default.", "train 1 GPU Enters its queue after: hello is done.",
    ]  # fmt: skip
    assert page.count("Settings of") == 2
    assert "Each run is planned by itself" not in page
    twice = show_plan(browser, PIPELINE.replace("after: hello\n", ""))
    assert "Each run is planned by itself: those that can start now may not all fit at once." in browser_text(
        twice.text
    )
    answer = submit_file(browser, PIPELINE)
    assert answer.headers["HX-Redirect"] == "/p/main/runs/hello/"
    assert list(Run.objects.order_by("pk").values_list("name", "status")) == [
        ("hello", "submitted"), ("train", "pending"),
    ]  # fmt: skip
    page = browser.get("/p/main/runs/hello/").content.decode()
    assert "hello, train submitted" in page


def test_a_file_of_which_one_run_cannot_start_is_submitted_after_a_confirmation(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host("box-1")
    opened = open_form(as_user(ann), SUBMIT)
    asked = opened.send({"config": PIPELINE}, "Submit")
    assert asked.status_code == 422
    assert "cannot start" in asked.text
    assert not Run.objects.exists()
    opened.with_answer(asked).send({"config": PIPELINE, "anyway": True}, "Submit and wait")
    assert Run.objects.count() == 2


def test_an_error_in_a_file_with_several_runs_names_its_line_of_the_file(
    project: Project, ann: User, as_user: SignIn
) -> None:
    wrong = PIPELINE.replace("after: hello", "after: helo")
    page = browser_text(show_plan(as_user(ann), wrong).content.decode())
    assert "Line 8 · after.0.run No run is called 'helo' in main" in page


def browser_text(page: str) -> str:
    return " ".join(html.unescape(strip_tags(page)).split())


def test_an_error_names_its_line_and_key(project: Project, ann: User, as_user: SignIn) -> None:
    answer = show_plan(as_user(ann), HELLO + "resurces: {}\n")
    page = answer.content.decode()
    assert answer.status_code == 422
    assert 'data-error-line="5"' in page
    assert "resurces" in page


@pytest.mark.parametrize(
    ("config", "line"), [("type: task\ncommands: [a\n", 2), ("type: fleet\ncommands: [a]\n", 1), ("- a\n", None)]
)
def test_an_invalid_run_file_is_refused_with_its_line(
    project: Project, ann: User, as_user: SignIn, config: str, line: int | None
) -> None:
    answer = submit_file(as_user(ann), config)
    assert answer.status_code == 422
    assert line is None or f'data-error-line="{line}"' in answer.content.decode()


def test_crlf_line_ends_do_not_shift_line_numbers(project: Project, ann: User, as_user: SignIn) -> None:
    config = (HELLO + "resurces: {}\n").replace("\n", "\r\n")
    answer = submit_file(as_user(ann), config)
    assert 'data-error-line="5"' in answer.content.decode()


def test_a_submit_redirects_to_the_runs_page(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    answer = submit_file(as_user(ann), HELLO)
    assert answer["HX-Redirect"] == "/p/main/runs/hello/"
    without_scripts = submit_file(as_user(ann), HELLO.replace("hello", "plain"), scripts=False, follow=True)
    assert without_scripts.redirect_chain == [("/p/main/runs/plain/", 302)]


def test_without_scripts_an_error_page_keeps_the_typed_text(project: Project, ann: User, as_user: SignIn) -> None:
    answer = submit_file(as_user(ann), HELLO + "priority: 101\n", scripts=False)
    assert answer.status_code == 422
    assert "priority: 101" in answer.content.decode()
    assert 'data-error-line="5"' in answer.content.decode()


def test_a_run_that_no_host_can_ever_satisfy_needs_confirmation(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1", gpus=1)
    config = HELLO + "resources: {gpu: 8}\n"
    client = as_user(ann)
    answer = submit_file(client, config)
    assert answer.status_code == 422
    page = answer.content.decode()
    assert "no host has enough" in page.lower()
    assert re.search(r'name="anyway"[^>]*data-asked', page)
    assert "Nothing was submitted yet" in page
    assert re.search(r'id="submit-button"[^>]*hx-swap-oob="outerMorph".*Submit and wait', page, re.DOTALL)
    planned = show_plan(client, config).content.decode()
    assert "Submit and wait" in planned
    assert "data-asked" not in planned
    without_scripts = submit_file(client, config, scripts=False)
    plain = without_scripts.content.decode()
    assert plain.count('id="submit-button"') == plain.count("Submit and wait") == 1
    assert re.search(r'name="anyway"[^>]*autofocus', plain)
    assert not re.search(r"<textarea[^>]*autofocus", plain)
    assert "Submit and wait" not in show_plan(client, HELLO).content.decode()
    assert not Run.objects.exists()
    submit(client, without_scripts, {"anyway": True}, button="Submit and wait", scripts=False)
    place_all()
    assert "no host has enough" in client.get("/p/main/queue/").content.decode()


def test_quoted_input_in_an_error_is_escaped(project: Project, ann: User, as_user: SignIn) -> None:
    answer = show_plan(as_user(ann), HELLO + "'<b>x</b>': 1\n")
    assert "<b>x" not in answer.content.decode()
    assert "<code>&lt;b&gt;x&lt;/b&gt;</code>" in answer.content.decode()


def test_a_taken_name_is_an_error(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    make_run(project, ann, "hello")
    answer = submit_file(as_user(ann), HELLO)
    assert answer.status_code == 422
    assert "Choose another name" in answer.content.decode()


def test_too_many_large_files_are_an_error_beside_the_typed_text(
    project: Project, ann: User, as_user: SignIn, settings: LazySettings
) -> None:
    settings.DSTACKWEB_PROJECT_SUBMIT_MB = 1
    make_host("box-1")
    client, large = as_user(ann), "type: task\ncommands:\n- |\n  : " + "x" * 200_000 + "\n"
    assert [submit_file(client, large, scripts=False).status_code for _ in range(2)] == [302, 302]
    answer = submit_file(client, large, scripts=False)
    page = answer.content.decode()
    assert answer.status_code == 422
    assert "main has submitted 1 MB of large run files within an hour" in page
    assert "x" * 200_000 in page
    assert Run.objects.count() == 2


def test_an_attached_archive_is_submitted_with_the_run(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    client = as_user(ann)
    submit_with_archive(client, HELLO, packed())
    run = Run.objects.get(name="hello")
    assert run.archive is not None
    again = open_form(client, f"{SUBMIT}?from={run.uid}")
    assert run.archive.sha256 in again.values["archive_sha256"]
    (config,) = again.values["config"]
    assert "echo hello" in config
    again.send({"config": config.replace("name: hello", "name: again")}, "Submit")
    assert Run.objects.get(name="again").archive == run.archive


def test_run_again_fills_the_form_with_yaml_whatever_the_run_was_submitted_as(
    project: Project, ann: User, as_user: SignIn
) -> None:
    run = make_run(project, ann, "one", commands=["echo 1", "if true; then\n  echo 2\nfi\n"])
    page = as_user(ann).get(f"/p/main/submit/?from={run.uid}").text
    assert "name: one\ncommands:\n- echo 1\n- |\n  if true; then\n    echo 2\n  fi\n" in page
    assert "&quot;type&quot;" not in page


def test_without_scripts_an_archive_is_kept_while_errors_are_fixed(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host()
    client = as_user(ann)
    answer = submit_with_archive(client, HELLO + "priority: 101\n", packed(), scripts=False)
    assert answer.status_code == 422
    assert Archive.objects.get().sha256 in answer.content.decode()
    submit(client, answer, {"config": HELLO}, button="Submit", scripts=False)
    assert Run.objects.get().archive == Archive.objects.get()


def test_an_invalid_archive_is_refused_with_a_message(project: Project, ann: User, as_user: SignIn) -> None:
    wrong = SimpleUploadedFile("code.zip", b"PK\x03\x04", "application/zip")
    answer = submit_with_archive(as_user(ann), HELLO, wrong)
    assert answer.status_code == 422
    assert "is not a .tar.gz" in answer.content.decode()
    assert not Run.objects.exists()


def test_an_archive_over_the_limit_is_refused(project: Project, ann: User, as_user: SignIn, settings) -> None:
    settings.DSTACKWEB_ARCHIVE_LIMIT_MB = 0
    answer = submit_with_archive(as_user(ann), HELLO, packed())
    assert answer.status_code == 422
    assert "over the limit" in answer.content.decode()
    assert not Archive.objects.exists()


def test_a_file_over_256_kb_is_refused(project: Project, ann: User, as_user: SignIn) -> None:
    answer = submit_file(as_user(ann), HELLO + "#" * 300_000)
    assert answer.status_code == 422
    assert "256" in answer.content.decode()


def test_every_example_is_offered_and_can_be_planned(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1", gpus=8)
    client = as_user(ann)
    page = client.get(SUBMIT)
    opened = open_form(client, page)
    assert examples()
    for example in examples():
        assert f">{example.name}</button>" in page.text
        assert opened.send({"config": example.text}, "Show plan").status_code == 200


def test_forms_without_their_token_are_refused(project: Project, ann: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(ann)
    assert client.post(SUBMIT, {"config": HELLO}).status_code == 403
