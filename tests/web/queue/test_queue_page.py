"""The queue page: the true order, why each run waits, and what people do to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Queue, Run, UsageDay
from dstackweb.runs.queue import queues
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes import forecast_pass
from tests.factories import join, make_host, make_run, make_user, place_all
from tests.forms import submit
from tests.web.conftest import HTMX
from tests.web.queue.rows import QUEUE
from tests.web.runs.actions import set_priority

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]


def order_on(page: str, *names: str) -> list[str]:
    """The names in the order in which they stand in the list of waiting runs."""
    return sorted(names, key=lambda name: page.index(f"/runs/{name}/"))


def toast_of(response) -> str:
    return json.loads(response["HX-Trigger"])["toast"]["text"]


def press_pause(client: Client, button: str, **request: Any) -> Any:
    return submit(client, QUEUE, having="paused", button=button, **request)


def test_the_queue_shows_runs_in_scheduling_order(project: Project, ann: User, as_user: SignIn) -> None:
    """R23, R27: higher priority first, equal ones first come, first served."""
    for name, priority in (("training", 50), ("dev", 30), ("ab-test", 70), ("second-training", 50)):
        make_run(project, ann, name, priority=priority)
    page = as_user(ann).get(QUEUE).content.decode()
    shown = order_on(page, "training", "dev", "ab-test", "second-training")
    assert shown == ["ab-test", "training", "second-training", "dev"]


def test_a_waiting_run_has_a_reason_with_numbers(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1", cpus=2, gpus=1)
    make_run(project, ann, "holder", resources={"gpu": 1})
    place_all()
    make_run(project, ann, "waits", resources={"gpu": 1})
    make_run(project, ann, "too-big", resources={"gpu": 9})
    place_all()
    page = as_user(ann).get(QUEUE).content.decode()
    assert "needs 1 GPU, 0 of 1 free on box-1" in page
    assert "no host has enough: 9 GPUs required, at most 1 GPU on one host" in page


def test_the_queue_shows_when_runs_start_or_why_that_is_unknown(project: Project, ann: User, as_user: SignIn) -> None:
    make_host(gpus=1)
    make_run(project, ann, "holder", resources={"gpu": 1}, max_duration="1h")
    place_all()
    make_run(project, ann, "behind", resources={"gpu": 1}, max_duration="off")
    make_run(project, ann, "last", resources={"gpu": 1})
    forecast_pass.refresh()
    page = as_user(ann).get(QUEUE).content.decode()
    cells = re.findall(r'class="q-fact num q-start" data-label="[^"]*" title="([^"]*)">(.*?)</td>', page, re.S)
    assert [title for title, _cell in cells] == [
        "after holder ends, from its max_duration",
        "behind has no max_duration and no history",
    ]
    assert "<time" in cells[0][1]
    assert "no estimate" in cells[1][1]
    Queue.objects.update(paused=True)
    assert as_user(ann).get(QUEUE).content.decode().count('title="the queue is paused"') == 2


def test_the_next_run_is_the_first_one_that_can_ever_start(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1", cpus=2, gpus=1)
    make_run(project, ann, "holder", resources={"gpu": 1})
    make_run(project, ann, "too-big", resources={"gpu": 9}, priority=70)
    place_all()
    client = as_user(ann)
    assert "No host fits any queued run" in client.get(QUEUE).content.decode()
    make_run(project, ann, "waits", resources={"gpu": 1}, priority=60)
    place_all()
    page = client.get(QUEUE).content.decode()
    assert order_on(page, "too-big", "waits") == ["too-big", "waits"]
    assert '<div class="kpi text-truncate">waits</div>' in page


@pytest.mark.parametrize("typed", ["", "high", "101", "-1", "50.5"])
def test_an_invalid_priority_is_refused_with_a_message(
    project: Project, ann: User, as_user: SignIn, typed: str
) -> None:
    """R22: an integer from 0 to 100."""
    run = make_run(project, ann)
    answer = set_priority(as_user(ann), run, typed)
    assert answer.status_code == 422
    assert "0 to 100" in toast_of(answer)


def test_members_may_not_go_above_their_limit_or_touch_others_runs(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    """No page offers them a form for others' runs."""
    own, other = make_run(project, ann), make_run(project, mia)
    client = as_user(ann)
    assert set_priority(client, own, "90").status_code == 422
    assert client.post(f"/p/main/runs/{other.uid}/priority/", {"priority": "10"}, headers=HTMX).status_code == 403
    assert client.post(f"/p/main/runs/{other.uid}/stop/", headers=HTMX).status_code == 403
    page = client.get(QUEUE).content.decode()
    assert re.findall('name="raise" value="([0-9]+)"', page) == [str(own.pk)]


def test_an_unchanged_queue_answers_a_poll_with_nothing(project: Project, ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    version = client.get(QUEUE)["HX-PTag"]
    poll = {**HTMX, "HX-PTag": version}
    assert client.get(QUEUE, headers=poll).status_code == 204
    make_run(project, ann, "new-one")
    answer = client.get(QUEUE, headers=poll)
    assert answer.status_code == 200
    assert "new-one" in answer.content.decode()
    assert "<html" not in answer.content.decode()
    assert answer["HX-PTag"] != version


def test_a_poll_that_finds_nothing_new_costs_a_handful_of_queries(
    project: Project, ann: User, as_user: SignIn, django_assert_max_num_queries
) -> None:
    client = as_user(ann)
    version = client.get(QUEUE)["HX-PTag"]
    with django_assert_max_num_queries(5):
        client.get(QUEUE, headers={**HTMX, "HX-PTag": version})


def test_the_queue_costs_the_same_queries_for_one_run_and_for_a_full_page(
    project: Project, ann: User, as_user: SignIn, django_assert_max_num_queries
) -> None:
    for number in range(25):
        make_run(project, ann, f"sweep-{number}")
    client = as_user(ann)
    client.get(QUEUE)  # which policies are violated is looked up once in a few seconds
    with django_assert_max_num_queries(17):
        client.get(QUEUE)


def test_a_manager_pauses_and_resumes_the_queue(project: Project, ann: User, mia: User, as_user: SignIn) -> None:
    run = make_run(project, ann)
    answer = press_pause(as_user(mia), "Pause queue")
    alert = answer.content.decode().partition('role="status"')[2].partition("</section>")[0]
    assert "is paused" in alert
    assert alert.index("Resume queue") < alert.index('aria-label="Waiting runs"')
    assert "Resume queue" not in as_user(ann).get(QUEUE).content.decode()
    as_member = as_user(ann).post("/p/main/queues/default/pause/", {"paused": "no"}, headers=HTMX)
    assert as_member.status_code == 403, "no page has sent it"
    make_host()
    place_all()
    assert Run.objects.get(pk=run.pk).status == "submitted"
    press_pause(as_user(mia), "Resume queue")
    place_all()
    assert Run.objects.get(pk=run.pk).status == "provisioning"


def test_without_scripts_the_page_says_that_the_queue_was_paused_and_resumed(
    project: Project, mia: User, as_user: SignIn
) -> None:
    client = as_user(mia)
    for button, text in (("Pause queue", "Queue default paused"), ("Resume queue", "Queue default resumed")):
        answer = press_pause(client, button, scripts=False)
        assert answer.status_code == 303
        assert text in client.get(answer["Location"]).text


def test_an_empty_queue_offers_to_submit(project: Project, ann: User, as_user: SignIn) -> None:
    page = as_user(ann).get(QUEUE).content.decode()
    assert "No waiting runs." in page
    assert "/p/main/submit/" in page


def test_viewers_see_the_queue_and_cannot_change_it(project: Project, ann: User, as_user: SignIn) -> None:
    """No page sends the last request for them."""
    run = make_run(project, ann)
    client = as_user(join(project, make_user("vic"), "viewer"))
    page = client.get(QUEUE).content.decode()
    assert run.name in page
    assert "/submit/" not in page
    assert client.get("/p/main/submit/").status_code == 403
    assert client.post(f"/p/main/runs/{run.uid}/stop/", headers=HTMX).status_code == 403


def test_long_queues_are_paginated(project: Project, ann: User, as_user: SignIn) -> None:
    for number in range(27):
        make_run(project, ann, f"sweep-{number}")
    client = as_user(ann)
    assert "1–25 of 27" in client.get(QUEUE).content.decode()
    second = client.get("/p/main/queue/?page=2").content.decode()
    assert "/runs/sweep-26/" in second
    assert "/runs/sweep-1/" not in second
    assert "26–27 of 27" in client.get("/p/main/queue/?page=99").content.decode()


def test_strangers_get_404_and_signed_out_users_are_asked_to_sign_in(project: Project, as_user: SignIn) -> None:
    stranger = as_user(make_user("stranger"))
    assert stranger.get(QUEUE).status_code == 404
    assert stranger.get("/p/no-such-project/queue/").status_code == 404
    answer = Client().get("/p/main/queue/?page=2")
    assert answer.status_code == 302
    assert answer["Location"] == "/login/?next=/p/main/queue/%3Fpage%3D2"
    poll = Client().get(QUEUE, headers=HTMX)
    assert (poll.status_code, poll["HX-Refresh"]) == (401, "true")


def test_each_row_says_its_reason_once_in_words_that_stand_alone(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1", cpus=2, gpus=1)
    for name, gpus in (("one", 9), ("two", 9), ("three", 8), ("four", 9)):
        make_run(project, ann, name, resources={"gpu": gpus})
    place_all()
    page = as_user(ann).get(QUEUE).content.decode()
    reasons = re.findall(r'<div class="why why-bad">(.*?)</div>', page)
    assert [re.findall(r"\d GPUs", reason)[0] for reason in reasons] == ["9 GPUs", "9 GPUs", "8 GPUs", "9 GPUs"]
    rows = page[page.index('id="waiting"') : page.index("</tbody>")]
    assert ">impossible<" not in rows
    assert 'name="stop"' not in page


def test_each_run_with_a_reservation_is_marked_and_none_whose_hold_has_lapsed(
    project: Project, ann: User, as_user: SignIn
) -> None:
    at = timezone.now()
    for name, starts_at, lapsed_at in (("one", at, None), ("two", None, None), ("three", None, at)):
        run = Run.objects.get(pk=make_run(project, ann, name).pk)
        Reservation.objects.create(run=run, nodes=[], starts_at=starts_at, expires_at=at, lapsed_at=lapsed_at)
    text = as_user(ann).get(QUEUE).text
    assert (text.count("reserved, starts by"), text.count("reserved, start time unknown")) == (1, 1)


def test_fair_share_is_a_bar_for_each_member_and_refreshed_when_shares_change(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    page = as_user(ann).get(QUEUE)
    assert 'id="shares"' not in page.content.decode()
    queue = Queue.objects.get(project=project, name="default")
    queues.change_queue(queue, mia, "manager", fair_share_minutes=60)
    make_run(project, mia, "small", resources={"gpu": 1})
    for name in ("first", "second"):
        make_run(project, ann, name, resources={"gpu": 4})
    page = as_user(mia).get(QUEUE)
    listed, _mark, shares = page.content.decode().partition('id="shares"')
    assert re.findall(r'<span class="dw-tag dw-tag-info">(fair share.*?)</span>', listed) == [
        "fair share: 30 min behind"
    ]
    shares = shares.partition("</section>")[0]
    assert re.findall(r'<th scope="row"[^>]*>(\w+)</th>', shares) == ["ann", "mia"]
    assert "recently used 0 GPU-h, 8 GPUs queued" in shares
    assert re.findall(r"<b>(.*?)</b>", shares) == ["52 min"]
    assert '<rect class="queued" x="0.00" width="8.00"' in shares
    assert "median 1 GPU-h, half-life 7 d, penalty up to 1 h" in " ".join(shares.split())
    poll = {**HTMX, "HX-PTag": page["HX-PTag"]}
    queues.count_shares(timezone.now())
    assert as_user(mia).get(QUEUE, headers=poll).status_code == 204, "nothing shown has changed"
    UsageDay.objects.create(project=project, queue=queue, user=mia, day=timezone.now().date(), gpu_ms=50 * 3_600_000)
    queues.count_shares(timezone.now())
    news = as_user(mia).get(QUEUE, headers=poll).content.decode()
    assert re.search(r"used (48|49|50) GPU-h, 1 GPU queued", news), "it has decayed since the middle of today"
