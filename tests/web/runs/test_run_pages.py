"""The list of runs, and one run: its steps, why it ended, its settings and its log."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import attempts, logs, pipelines, services
from dstackweb.runs.models import Job, Run
from dstackweb.runs.services import ensure_queue
from tests.factories import make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.forms import open_form, submit
from tests.web.conftest import HTMX
from tests.web.runs.actions import page_of, set_priority, stop, submit_file

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]


def ended(run: Run, reason: str, **result: object) -> Run:
    """Take a submitted run through a placement and a start to this end."""
    place_all()
    job = start(placed_job(run))
    attempts.end_job(job.pk, reason, **result)
    return Run.objects.get(pk=run.pk)


def test_a_failed_run_shows_its_reason_in_plain_words(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = ended(make_run(project, ann, "typo"), "container_exited_with_error", exit_code=127)
    page = as_user(ann).get(f"/p/main/runs/{run.name}/").content.decode()
    assert "A command failed." in page
    assert "Exit code 127: command not found." in page


def test_settings_show_their_sources(project: Project, ann: User, as_user: SignIn) -> None:
    config = "type: task\nname: traced\ncommands:\n  - echo hi\npriority: 70\n"
    submit_file(as_user(ann), config)
    page = as_user(ann).get("/p/main/runs/traced/").content.decode()
    assert "run file, line 5" in page
    assert "profile default" in page
    assert "24h" in page


def test_a_changed_priority_is_marked_and_in_the_timeline(project: Project, ann: User, as_user: SignIn) -> None:
    run = make_run(project, ann)
    set_priority(as_user(ann), run, "55")
    page = as_user(ann).get(f"/p/main/runs/{run.name}/").content.decode()
    assert "Priority changed from 50 to 55" in page
    assert "changed since" in page


def test_an_unchanged_run_answers_a_poll_with_nothing_and_an_event_changes_it(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host()
    run = make_run(project, ann)
    client = as_user(ann)
    version = client.get(f"/p/main/runs/{run.name}/")["HX-PTag"]
    poll = {**HTMX, "HX-PTag": version}
    assert client.get(f"/p/main/runs/{run.name}/", headers=poll).status_code == 204
    place_all()
    answer = client.get(f"/p/main/runs/{run.name}/", headers=poll)
    assert "Placed on box-1" in answer.content.decode()
    assert "data-poll-over" not in answer.content.decode()


def test_the_page_of_an_ended_run_stops_polling(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = ended(make_run(project, ann), "done_by_runner", exit_code=0)
    assert "data-poll-over" in as_user(ann).get(f"/p/main/runs/{run.name}/").content.decode()


def test_a_waiting_runs_place_is_shown_and_follows_the_queue(project: Project, ann: User, as_user: SignIn) -> None:
    make_run(project, ann, "first")
    make_run(project, ann, "second")
    client = as_user(ann)
    page = client.get("/p/main/runs/second/")
    assert "Waiting at position 2" in page.content.decode()
    stop(client, Run.objects.get(name="first"))
    poll = client.get("/p/main/runs/second/", headers={**HTMX, "HX-PTag": page["HX-PTag"]})
    assert "Waiting at position 1" in poll.content.decode()


def test_the_reason_and_the_exit_code_of_a_job_are_shown_once(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = ended(make_run(project, ann), "container_exited_with_error", exit_code=3)
    page = as_user(ann).get(f"/p/main/runs/{run.name}/").content.decode()
    assert page.count("Exit code 3.") == 2  # the verdict and the event
    assert '<div class="why">A command failed.</div>' in page


def test_only_new_log_bytes_travel_and_any_bytes_do(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = make_run(project, ann)
    place_all()
    job = start(placed_job(run))
    logs.append_log(job.pk, 0, b"one\n\xff\xfe\x00two\n")
    client = as_user(ann)
    first = client.get(f"/p/main/runs/{run.uid}/log/?attempt=1&node=0&tail=100")
    assert first.content == b"one\n\xff\xfe\x00two\n"
    assert (first["X-Start-Offset"], first["X-Next-Offset"], first["X-Log-Complete"]) == ("0", "11", "false")
    logs.append_log(job.pk, 11, b"three\n")
    attempts.end_job(job.pk, "done_by_runner", exit_code=0, log_missing=1536)
    second = client.get(f"/p/main/runs/{run.uid}/log/?attempt=1&node=0&offset=11")
    assert (second.content, second["X-Log-Complete"]) == (b"three\n", "true")
    assert (first["X-Log-Missing"], second["X-Log-Missing"]) == ("", "1.5 KB")


def test_a_log_that_was_cut_says_so(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = make_run(project, ann)
    place_all()
    Job.objects.filter(run=run).update(log_cut="project_quota")
    assert as_user(ann).get(f"/p/main/runs/{run.uid}/log/?attempt=1&node=0")["X-Log-Cut"] == "project_quota"


def test_a_log_is_downloaded_as_it_was_written(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = make_run(project, ann, "noisy")
    place_all()
    job = start(placed_job(run))
    logs.append_log(job.pk, 0, b"<script>\x1b[31m\xff")
    answer = as_user(ann).get(f"/p/main/runs/{run.uid}/log/?download=1")
    assert b"".join(answer.streaming_content) == b"<script>\x1b[31m\xff"
    assert "attachment" in answer["Content-Disposition"]
    assert "noisy-1-0.log" in answer["Content-Disposition"]
    polled = as_user(ann).get(f"/p/main/runs/{run.uid}/log/?offset=0")
    for each, kind in ((answer, "text/plain; charset=utf-8"), (polled, "application/octet-stream")):
        assert (each["Content-Type"], each["X-Content-Type-Options"]) == (kind, "nosniff")


def test_a_log_opened_in_the_browser_is_text_that_runs_nothing(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = make_run(project, ann, "noisy")
    place_all()
    logs.append_log(start(placed_job(run)).pk, 0, b"<script>alert(1)</script>")
    answer = as_user(ann).get(f"/p/main/runs/{run.uid}/log/?view=1")
    assert answer["Content-Type"] == "text/plain; charset=utf-8"
    assert answer["X-Content-Type-Options"] == "nosniff"
    assert answer["Content-Security-Policy"].startswith("sandbox")
    assert answer["Content-Disposition"].startswith("inline")


def test_lines_matches_and_marks_of_a_log_are_found_without_reading_it(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host()
    run = make_run(project, ann, "noisy")
    log = f"/p/main/runs/{run.uid}/log"
    client = as_user(ann)
    assert client.get(f"{log}/lines/").json()["counts"] == []
    place_all()
    job = start(placed_job(run))
    logs.append_log(job.pk, 0, b"x\n" * 200_000)
    logs.append_marks(job.pk, 0, b"m" * 16)
    found = client.get(f"{log}/lines/?node=0&first=0").json()
    assert found == {"size": 400_000, "block": 262_144, "counts": [131_072], "more": False}
    assert client.get(f"{log}/lines/?first={2**70}").json()["counts"] == []
    assert client.get(f"{log}/search/?q=X&offset=399996").json() == {"offsets": [399_996, 399_998], "next": None}
    assert client.get(f"{log}/search/?q=x&offset={2**70}").json() == {"offsets": [], "next": None}
    assert client.get(f"{log}/marks/").content == b"m" * 16
    assert client.get(f"{log}/marks/?offset={2**70}").content == b""
    for path in ("lines", "search", "marks"):
        assert client.get(f"{log}/{path}/?node=9&attempt=1").status_code == 404
        run.jobs.update(log_removed_at=timezone.now())
        assert client.get(f"{log}/{path}/", headers={"HX-Request": "true"}).status_code == 410
        run.jobs.update(log_removed_at=None)


def test_a_lost_log_is_reported_in_place_of_the_log(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = make_run(project, ann, "noisy")
    place_all()
    attempts.end_job(start(placed_job(run)).pk, "done_by_runner", exit_code=0, log_size=9)
    url = f"/p/main/runs/{run.uid}/log/?attempt=1&node=0&tail=100"
    answer = as_user(ann).get(url, headers={"HX-Request": "true"})
    assert (answer.status_code, answer["Content-Type"]) == (410, "text/plain; charset=utf-8")
    assert "The log of noisy had 9 bytes, and 0 of them are here" in answer.content.decode()
    assert as_user(ann).get(url + "&download=1").status_code == 410


def test_a_log_of_a_missing_job_is_not_found(project: Project, ann: User, as_user: SignIn) -> None:
    run = make_run(project, ann)
    assert as_user(ann).get(f"/p/main/runs/{run.uid}/log/?attempt=7&node=3").status_code == 404


def test_another_projects_run_and_its_log_dont_exist(project: Project, ann: User, as_user: SignIn) -> None:
    elsewhere = make_project("elsewhere")
    run = make_run(elsewhere, make_user("eve"), "hidden")
    client = as_user(ann)
    for path in (f"runs/{run.uid}/", f"runs/{run.uid}/log/", f"runs/{run.uid}/log/search/"):
        assert client.get(f"/p/main/{path}").status_code == 404
        assert client.get(f"/p/elsewhere/{path}").status_code == 404


def test_stopping_a_running_run_requests_a_stop_and_is_idempotent(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = make_run(project, ann)
    place_all()
    start(placed_job(run))
    client = as_user(ann)
    opened = open_form(client, page_of(run), having="Stop")
    for _ in range(2):
        answer = opened.send()
        assert answer.status_code == 204
        assert "Stopping " in json.loads(answer["HX-Trigger"])["toast"]["text"]
    assert "Asked to stop" in client.get(f"/p/main/runs/{run.name}/").content.decode()


def test_a_run_that_is_being_stopped_can_be_aborted(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = make_run(project, ann)
    place_all()
    start(placed_job(run))
    client = as_user(ann)
    stop(client, run)
    assert Run.objects.get().stop_reason == "stopped_by_user"
    assert submit(client, page_of(run), to="/stop/", button="Abort").status_code == 204
    assert Run.objects.get().stop_reason == "aborted_by_user"


def test_an_ended_run_can_be_deleted_from_its_page_and_an_active_one_not(
    project: Project, ann: User, as_user: SignIn
) -> None:
    """No page sends the first request."""
    run = make_run(project, ann)
    client, page = as_user(ann), page_of(run)
    assert "delete-run" not in client.get(page).content.decode()
    assert client.post(f"{page}delete/", headers=HTMX).status_code == 409
    stop(client, run)
    assert "for good" in client.get(page).content.decode()
    assert submit(client, page, to="/delete/").status_code < 400
    assert not Run.objects.exists()


def test_a_removed_log_is_reported(project: Project, ann: User, as_user: SignIn) -> None:
    make_host()
    run = ended(make_run(project, ann), "done_by_runner", exit_code=0)
    run.jobs.update(log_removed_at=timezone.now())
    client, page = as_user(ann), f"/p/main/runs/{run.uid}/"
    assert "because it was old" in client.get(page).content.decode()
    assert client.get(f"{page}log/").status_code == 410


def test_stopping_an_ended_run_is_a_conflict_with_a_message(project: Project, ann: User, as_user: SignIn) -> None:
    run = make_run(project, ann)
    opened = open_form(as_user(ann), page_of(run), having="Stop")
    opened.send()
    answer = opened.send()
    assert answer.status_code == 409
    assert "already ended" in json.loads(answer["HX-Trigger"])["toast"]["text"]


def test_without_scripts_a_stop_redirects_back_to_the_run(project: Project, ann: User, as_user: SignIn) -> None:
    run = make_run(project, ann)
    answer = stop(as_user(ann), run, scripts=False, follow=True)
    assert answer.redirect_chain
    assert f"{run.name} ended" in answer.content.decode()


def test_the_list_filters_by_status_name_and_member(project: Project, ann: User, mia: User, as_user: SignIn) -> None:
    make_run(project, ann, "alpha")
    make_run(project, mia, "beta")
    gone = make_run(project, ann, "gamma")
    client = as_user(ann)
    stop(client, gone)

    def shown(query: str) -> set[str]:
        page = client.get(f"/p/main/runs/{query}").content.decode()
        return {name for name in ("alpha", "beta", "gamma") if f">{name}</a>" in page}

    assert shown("") == {"alpha", "beta", "gamma"}
    assert shown("?status=active") == {"alpha", "beta"}
    assert shown("?status=terminated") == {"gamma"}
    assert shown("?q=et") == {"beta"}
    assert shown(f"?q={'x' * 60_000}") == set()
    assert shown("?mine=yes") == {"alpha", "gamma"}
    assert shown("?member=mia") == {"beta"}
    assert shown("?status=nonsense&before=nonsense") == {"alpha", "beta", "gamma"}


def test_the_list_filters_by_queue_and_by_the_days_of_the_readers_zone(
    project: Project, ann: User, as_user: SignIn
) -> None:
    ensure_queue(project, "night")
    for name, queue, at in (("alpha", "default", "2026-03-01T22:30"), ("beta", "night", "2026-03-01T23:30")):
        run = make_run(project, ann, name, queue=queue)
        Run.objects.filter(pk=run.pk).update(submitted_at=dt.datetime.fromisoformat(f"{at}+00:00"))
    client = as_user(ann)

    def shown(query: str) -> set[str]:
        page = client.get(f"/p/main/runs/{query}").content.decode()
        return {name for name in ("alpha", "beta") if f">{name}</a>" in page}

    assert shown("?queue=night") == {"beta"}
    assert shown("?from=2026-03-01&to=2026-03-01") == {"alpha", "beta"}
    client.cookies["zone"] = "Europe/Berlin"
    assert shown("?to=2026-03-01") == {"alpha"}
    assert shown("?from=2026-03-02") == {"beta"}
    assert shown("?from=2026-03-03") == set()
    assert "No matching runs" in client.get("/p/main/runs/?from=2026-03-03").content.decode()
    assert shown("?from=nonsense&to=9999-12-31") == {"alpha", "beta"}
    client.cookies["zone"] = "Nowhere/Land"  # one that this machine does not know
    assert shown("?from=2026-03-03") == set()


def test_the_list_begins_with_the_oldest_on_request(project: Project, ann: User, as_user: SignIn) -> None:
    runs = [make_run(project, ann, f"sweep-{number}") for number in range(52)]
    client = as_user(ann)
    first = client.get("/p/main/runs/?sort=oldest&member=ann").content.decode()
    assert first.index(">sweep-0</a>") < first.index(">sweep-49</a>")
    assert ">sweep-50</a>" not in first
    assert f"sort=oldest&amp;member=ann&amp;before={runs[49].pk}" in first
    newer = client.get(f"/p/main/runs/?sort=oldest&before={runs[49].pk}").content.decode()
    assert newer.index(">sweep-50</a>") < newer.index(">sweep-51</a>")


def test_the_list_continues_where_the_previous_page_ended(project: Project, ann: User, as_user: SignIn) -> None:
    runs = [make_run(project, ann, f"sweep-{number}") for number in range(52)]
    client = as_user(ann)
    first = client.get("/p/main/runs/").content.decode()
    assert ">sweep-51</a>" in first
    assert f"before={runs[2].pk}" in first
    older = client.get(f"/p/main/runs/?before={runs[2].pk}").content.decode()
    assert ">sweep-1</a>" in older
    assert ">sweep-2</a>" not in older


def test_a_name_used_again_means_the_newest_and_the_list_reaches_the_older_by_id(
    project: Project, ann: User, as_user: SignIn
) -> None:
    old = make_run(project, ann, "again", priority=11)
    client = as_user(ann)
    stop(client, old)
    make_run(project, ann, "again", priority=22)
    assert 'value="22"' in client.get("/p/main/runs/again/").content.decode()
    assert f"/runs/{old.uid}/" in client.get("/p/main/runs/").content.decode()


def test_a_run_that_waits_for_a_sweep_leads_to_it(project: Project, ann: User, as_user: SignIn) -> None:
    config = {"type": "task", "name": "trials", "commands": ["true"], "array": 2}
    sweep, _new = pipelines.submit(project, ann, "member", services.Submission(config))
    make_run(project, ann, "report", after="trials")
    page = as_user(ann).get("/p/main/runs/report/").content.decode()
    graph = page.partition('id="run-dependencies"')[2].partition("</section>")[0]
    assert f'href="/p/main/sweeps/{sweep.uid}/"' in graph  # type: ignore[union-attr]  # it is a sweep


def test_a_run_that_waits_for_another_shows_both_as_a_graph_and_can_be_released(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_run(project, ann, "prepare")
    after = make_run(project, ann, "train", after={"run": "prepare", "on": "failed"})
    client = as_user(ann)
    page = client.get("/p/main/runs/train/").content.decode()
    assert "Enters its queue after: prepare has failed." in page
    assert "{run: prepare, on: failed}" in page
    graph = page.partition('id="run-dependencies"')[2].partition("</section>")[0]
    assert [name for name in ("prepare", "if it fails", "train", "Release") if name not in graph] == []
    behind = client.get("/p/main/runs/prepare/").content.decode().partition('id="run-dependencies"')[2]
    assert f"/p/main/runs/{after.uid}/" in behind.partition("</section>")[0]

    submit(client, "/p/main/runs/train/", to="/release/")
    page = client.get("/p/main/runs/train/").content.decode()
    assert Run.objects.get(pk=after.pk).status == "submitted"
    assert "Released: it no longer waits for other runs" in page
    assert "/release/" not in page


def test_the_page_of_a_run_without_dependencies_has_no_graph(project: Project, ann: User, as_user: SignIn) -> None:
    make_run(project, ann, "alone")
    assert "run-dependencies" not in as_user(ann).get("/p/main/runs/alone/").content.decode()


def test_a_page_is_renewed_when_a_run_that_it_names_changes(project: Project, ann: User, as_user: SignIn) -> None:
    """What a run waited for, and what waits for it, is on its page also when that changes nothing of the run itself."""
    make_host()
    first = make_run(project, ann, "first")
    client, seen = as_user(ann), {}

    def poll(name: str) -> int:
        answer = client.get(f"/p/main/runs/{name}/", headers=HTMX | {"HX-PTag": seen.get(name, "")})
        seen[name] = answer["HX-PTag"] if answer.status_code == 200 else seen[name]
        return answer.status_code

    first = ended(first, "done_by_runner", exit_code=0)
    assert (poll("first"), poll("first")) == (200, 204)
    follower = make_run(project, ann, "second", after=["first"])
    assert (poll("first"), poll("first")) == (200, 204)
    services.stop(follower, ann, "member")
    assert (poll("first"), poll("first")) == (200, 204)
