"""The page of a queue as it was: what it shows of a moment, and the ways to it."""

from __future__ import annotations

import datetime as dt
import html
import re
from collections.abc import Callable

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import attempts, removal, services
from dstackweb.runs.models import PastPlace, QueueHour, Run
from dstackweb.runs.queue import queues
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.web.conftest import HTMX

SignIn = Callable[[User], Client]
pytestmark = pytest.mark.django_db
PAST = "/p/main/queues/default/at/"


def at(moment: dt.datetime) -> str:
    return f"{PAST}?t={moment.isoformat().replace('+00:00', 'Z')}"


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)))


@pytest.fixture
def then(project: Project, ann: User, mia: User) -> dt.datetime:
    """A moment at which `small` runs, `large` waits, and the queue is paused; all of that has changed since."""
    make_host(cpus=4)
    small = make_run(project, ann, "small", resources={"cpu": 2})
    place_all()
    make_run(project, ann, "large", resources={"cpu": 4}, priority=40)
    place_all()
    queue = services.ensure_queue(project)
    queues.change_queue(queue, mia, "manager", paused=True, ageing_minutes=7)
    moment = timezone.now()
    queues.change_queue(queue, mia, "manager", paused=False, ageing_minutes=30)
    attempts.end_job(start(placed_job(small)).pk, "done_by_runner", exit_code=0)
    place_all()
    return moment


def test_it_shows_order_reasons_settings_and_placed_runs_of_the_moment(
    as_user: SignIn, ann: User, then: dt.datetime
) -> None:
    page = text_of(as_user(ann).get(at(then)).content.decode())
    assert "The queue was paused. By mia, since" in page
    assert "+1 priority per 7 min waiting" in page
    assert re.search(r" 1 large ann the queue is paused.* priority 40 4 CPUs .* placed ", page)
    assert re.search(r"Placed .* small ann box-1 ", page)
    now = text_of(as_user(ann).get(PAST).content.decode())
    assert "No runs waited." in now
    assert "paused" not in now


def test_deleted_runs_keep_their_place_and_are_counted(project: Project, as_user: SignIn, ann: User, mia: User) -> None:
    gone, stays = make_run(project, ann, "secret-plan"), make_run(project, ann, "eval")
    moment = timezone.now()
    removal.delete(services.stop(gone, ann, "member"), ann, "member")
    services.stop(stays, ann, "member")
    page = text_of(as_user(ann).get(at(moment)).content.decode())
    assert "1 has been deleted since" in page
    assert "secret-plan" not in page
    assert re.search(r" 1 deleted run .* stopped .* 2 eval ann ", page)


def test_a_run_is_marked_and_its_page_says_where_it_waited(
    project: Project, as_user: SignIn, ann: User, then: dt.datetime
) -> None:
    run = Run.objects.get(name="large")
    client = as_user(ann)
    page = client.get(f"{at(then)}&run=large").content.decode()
    assert '<tr class="moved" aria-current="true">' in page
    began = run.queued_at - dt.timedelta(minutes=1)
    assert "/queues/default/at/" not in client.get("/p/main/runs/large/").content.decode()
    Run.objects.filter(pk=run.pk).update(queued_at=began)
    PastPlace.objects.filter(run_id=run.pk).update(since=began)
    link = re.search(r'href="(/p/main/queues/default/at/[^"]*)"', client.get("/p/main/runs/large/").content.decode())
    assert link
    assert f"run={run.uid}" in link[1]
    assert '<tr class="moved" aria-current="true">' in client.get(html.unescape(link[1])).content.decode()
    missing = text_of(client.get(f"{at(then)}&run=small").content.decode())
    assert "small did not wait in this queue at that time." in missing
    assert client.get(f"{at(then)}&run=nothing").status_code == 404


@pytest.mark.parametrize(
    ("t", "says"),
    [
        ("2020-01-01T00:00Z", "The past of queues is kept for 30 days."),
        ("2999-01-01T00:00Z", "This time is still to come."),
        ("soon", "Give a date and a time, such as 2026-11-26T14:00."),
    ],
)
def test_a_moment_without_data_says_why(as_user: SignIn, ann: User, t: str, says: str) -> None:
    page = text_of(as_user(ann).get(f"{PAST}?t={t}").content.decode())
    assert says in page
    assert "No runs waited" not in page


def test_steps_and_hours_lead_to_other_moments_that_are_kept(project: Project, as_user: SignIn, ann: User) -> None:
    now = timezone.now()
    hour = now.replace(minute=0, second=0, microsecond=0) - dt.timedelta(hours=1)
    QueueHour.objects.create(queue=services.ensure_queue(project), band=2, hour=hour, length=3, length_max=5)
    client = as_user(ann)
    client.cookies["zone"] = "Asia/Kolkata"
    page = client.get(at(now - dt.timedelta(minutes=30))).content.decode()
    assert "Time (Asia/Kolkata)" in page
    found = re.findall(r'<a [^>]*?href="([^"]*)"[^>]*>(.*?)</a>', page, re.DOTALL)
    links = {text_of(text).strip(): html.unescape(link) for link, text in found}
    assert {"−1 d", "−1 h", "−1 min", "+1 min"} <= links.keys()
    assert "+1 h" not in links
    local = hour + dt.timedelta(hours=5, minutes=30)
    [bar] = [link for text, link in links.items() if text.endswith(f"{local:%H} :{local:%M}")]
    assert f"3 waiting {local:%H} :{local:%M}" in {re.sub(r" +", " ", text) for text in links}
    assert client.get(bar).status_code == 200
    assert client.get(links["−1 d"]).status_code == 200


def test_it_is_paged(project: Project, as_user: SignIn, ann: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstackweb.web.queue.past_views.PER_PAGE", 2)
    for number in range(5):
        make_run(project, ann, f"run-{number}")
    moment = timezone.now()
    page = text_of(as_user(ann).get(f"{at(moment)}&page=2").content.decode())
    assert "3–4 of 5" in page
    assert "run-2" in page
    assert "run-4" not in page
    assert "5–5 of 5" in text_of(as_user(ann).get(f"{at(moment)}&run=run-4").content.decode())


def test_strangers_do_not_see_it(project: Project, as_user: SignIn) -> None:
    stranger = join(make_project("other"), make_user("eve"))
    assert as_user(stranger).get(PAST).status_code == 404


def test_the_history_of_a_queue_leads_to_it(project: Project, as_user: SignIn, ann: User, then: dt.datetime) -> None:
    client = as_user(ann)
    charts = client.get("/p/main/queues/default/history/").content.decode()
    assert f'data-past="{PAST}"' in charts
    table = client.get("/p/main/queues/default/history/?as=table", headers=HTMX).content.decode()
    [link] = set(re.findall(rf'href="({PAST}\?t=[^"]*)"', table))
    assert client.get(html.unescape(link)).status_code == 200
    assert PAST not in client.get("/p/main/history/").content.decode()
