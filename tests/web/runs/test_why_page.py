"""Why not me: the factors of a run's place, the reason, and each place that was tried."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import queues, reorder
from dstackweb.runs.queue.move_preview import MoveTarget
from dstackweb.scheduler.passes import forecast_pass
from dstackweb.web.runs.why_views import CELLS, STRIP, place_in_queue
from tests.factories import join, make_host, make_project, make_run, make_user, place_all
from tests.web.conftest import HTMX
from tests.web.runs.actions import show_plan

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page))


def why(client: Client, run: Run) -> str:
    return client.get(f"/p/main/runs/{run.uid}/why/").content.decode()


def test_the_factors_of_a_place_are_spelled_out(project: Project, ann: User, mia: User, as_user: SignIn) -> None:
    make_run(project, ann, "first")
    run = make_run(project, ann, "waits")
    earlier = dt.timedelta(minutes=90)
    Run.objects.filter(pk=run.pk).update(
        seniority_us=run.seniority_us - earlier // dt.timedelta(microseconds=1),
        rank=run.rank - earlier // dt.timedelta(microseconds=1),
        submitted_at=timezone.now() - earlier,
    )
    for page in (why(as_user(ann), run), as_user(ann).get("/p/main/runs/waits/").content.decode()):
        shown = text_of(page)
        assert "priority 50" in shown
        assert "ageing +3" in shown
        assert "position 1 of 2" in shown
        assert "New runs below priority 54 will queue behind this one." in shown
        assert "moved by" not in shown
    run.refresh_from_db()
    reorder.move([run], mia, "manager", MoveTarget("bottom"))
    assert "moved by mia" in text_of(why(as_user(ann), run))


def test_whom_it_displaces_is_shown_here_and_in_the_plan(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    """Before it happens."""
    make_host(gpus=1)
    Queue.objects.filter(project=project).update(preempt_points=20)
    make_run(project, mia, "low", resources={"gpu": 1}, preemptible=True, priority=10)
    place_all()
    run = make_run(project, ann, "urgent", resources={"gpu": 1}, priority=60)
    text = "hen its turn comes, it displaces 1 run of mia"
    client = as_user(ann)
    assert text in text_of(why(client, run))
    config = "type: task\ncommands: ['true']\nresources: {gpu: 1}\npriority: 60\n"
    planned = show_plan(client, config).content.decode()
    assert text in text_of(planned)


def test_the_expected_start_is_shown_with_what_it_rests_on(project: Project, ann: User, as_user: SignIn) -> None:
    make_host(gpus=1)
    make_run(project, ann, "holder", resources={"gpu": 1}, max_duration="1h")
    place_all()
    run = make_run(project, ann, "waits", resources={"gpu": 1})
    assert "Expected start: estimating the next estimate includes it" in text_of(why(as_user(ann), run))
    forecast_pass.refresh()
    for page in (why(as_user(ann), run), as_user(ann).get("/p/main/runs/waits/").content.decode()):
        assert re.search(r"Expected start: by \d\d:\d\d UTC after holder ends, from its max_duration", text_of(page))


def test_a_paused_queue_is_named_beside_what_could_never_start(project: Project, ann: User, as_user: SignIn) -> None:
    make_host(cpus=2)
    run = make_run(project, ann, "wide", resources={"cpu": 4})
    Queue.objects.update(paused=True)
    place_all()
    for page in (why(as_user(ann), run), as_user(ann).get("/p/main/runs/wide/").content.decode()):
        shown = text_of(page)
        first, _, also = shown.partition("It also waits for:")
        assert "No host has enough: 4 CPUs required, at most 2 CPUs on one host." in first
        assert "paused" not in first
        assert "the queue is paused; a manager can resume it" in also


def test_every_place_is_listed_with_its_missing_resources(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("busy-box", cpus=4, gpus=2)
    make_host("small-box", cpus=2, gpus=1)
    make_host("away-box", cpus=8, gpus=4, draining=True)
    make_run(project, ann, "holder", resources={"gpu": 2})
    place_all()
    run = make_run(project, ann, "waits", resources={"gpu": 2})
    page = why(as_user(ann), run)
    shown = text_of(page)
    assert "needs 2 GPUs, 0 of 2 free" in shown
    assert "needs 2 GPUs, has 1" in shown
    assert "it takes no new jobs" in shown
    assert "Evaluated" in shown
    assert "Waiting at position 1" in shown


def test_limits_and_a_reservation_that_hold_it_up_are_named(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    make_host("box", cpus=4, gpus=2)
    make_run(project, ann, "holder", resources={"gpu": 1})
    place_all()
    queues.change_queue(project.queues.get(), mia, "manager", max_gpus=1)
    run = make_run(project, ann, "waits", resources={"gpu": 1})
    assert "hold 1 of at most 1" in text_of(why(as_user(ann), run))


def test_a_run_outside_the_queue_shows_that_it_does_not_wait(project: Project, ann: User, as_user: SignIn) -> None:
    run = make_run(project, ann, "over")
    services.stop(run, ann, "member")
    page = why(as_user(ann), run)
    assert "This run is not waiting" in page
    assert "not in the queue" not in page.lower()
    assert text_of(page.partition('id="why-outcome"')[2]).count("terminated") == 1
    assert "Why this run is waiting" not in page
    assert "Hosts and offers tried" not in page


def test_neighbours_are_the_runs_directly_ahead_and_behind(project: Project, ann: User, as_user: SignIn) -> None:
    runs = [make_run(project, ann, f"r-{number}") for number in range(9)]
    page = why(as_user(ann), runs[4]).partition('id="why-line"')[2]
    assert re.findall(r"r-\d", text_of(page)) == ["r-1", "r-2", "r-3", "r-4", "r-5", "r-6", "r-7"]
    assert re.findall(r'pos">(\d+)', page) == ["2", "3", "4", "5", "6", "7", "8"]


def test_the_strip_shows_the_place_in_short_and_long_queues(project: Project, ann: User) -> None:
    run = make_run(project, ann)
    alone = place_in_queue(run)
    assert alone is not None
    assert [cell.kind for cell in alone.cells] == ["me"]
    long = replace(alone, total=CELLS * 2000)
    ahead, behind, me = long.cells
    assert (ahead.width, me.x) == (0, 0)
    assert behind.x + behind.width == STRIP
    assert me.width > 0


def test_the_page_is_polled_and_closed_to_strangers(project: Project, ann: User, as_user: SignIn) -> None:
    run = make_run(project, ann)
    first = as_user(ann).get(f"/p/main/runs/{run.uid}/why/")
    poll = as_user(ann).get(f"/p/main/runs/{run.uid}/why/", headers={**HTMX, "HX-PTag": first["HX-PTag"]})
    assert poll.status_code in (204, 200)
    viewer = join(project, make_user(), "viewer")
    assert as_user(viewer).get(f"/p/main/runs/{run.uid}/why/").status_code == 200
    stranger = join(make_project("other"), make_user())
    assert as_user(stranger).get(f"/p/main/runs/{run.uid}/why/").status_code == 404


def test_a_waiting_run_is_changed_where_it_says_why_it_waits(project: Project, ann: User, as_user: SignIn) -> None:
    make_host(gpus=1)
    make_run(project, ann, "holder", resources={"gpu": 1})
    place_all()
    run = make_run(project, ann, "waits", resources={"gpu": 1})
    page = why(as_user(ann), run)
    assert f'action="/p/main/runs/{run.uid}/priority/"' in page
    assert 'hx-sync="#why:queue all"' in page
    assert f'action="/p/main/runs/{run.uid}/stop/"' in page
    assert re.search(rf'href="/p/main/submit/\?from={run.uid}">.*?Edit a copy', page, re.S)
    other = why(as_user(join(project, make_user("otto"), "member")), run)
    assert "/priority/" not in other
    assert "/stop/" not in other
    services.stop(run, ann, "member")
    polled = as_user(ann).get(f"/p/main/runs/{run.uid}/why/", headers=HTMX).text
    assert "/priority/" not in polled
    assert "Run again" in polled


def test_a_penalty_of_fair_share_is_explained_with_its_numbers(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    queues.change_queue(services.ensure_queue(project), mia, "manager", fair_share_minutes=60)
    make_run(project, mia, "small", resources={"gpu": 1})
    make_run(project, ann, "first", resources={"gpu": 8})
    run = make_run(project, ann, "large", resources={"gpu": 8})
    for page in (why(as_user(ann), run), as_user(ann).get("/p/main/runs/large/").content.decode()):
        shown = text_of(page)
        assert "fair share: 30 min behind" in shown
        assert (
            "Fair share of ann: recently used 0 GPU-h, 16 GPUs queued; the median is 8 GPU-h: 30 min behind." in shown
        )
    planned = show_plan(as_user(ann), "type: task\ncommands: ['true']\nresources: {gpu: 2}\n")
    assert "Fair share: recently used 0 GPU-h, 18 GPUs queued; the median is 2 GPU-h: 53 min behind." in text_of(
        planned.content.decode()
    )
