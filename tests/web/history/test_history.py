"""The history pages: what they show, to whom, and in which zone."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from dstackweb.accounts.models import Project, User
from dstackweb.runs import history, services, start_estimates
from dstackweb.runs.models import Queue, QueueHour, Run
from tests.factories import make_project, make_user
from tests.web.conftest import HTMX

SignIn = Callable[[User], Client]

pytestmark = pytest.mark.django_db
NOON = dt.datetime(2026, 11, 21, 12, 30, tzinfo=dt.UTC)


@pytest.fixture(autouse=True)
def look_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[dt.datetime], None]:
    """Sets when the pages are looked at: at noon, unless a test says otherwise."""

    def at(moment: dt.datetime) -> None:
        monkeypatch.setattr("dstackweb.web.history.timezone", SimpleNamespace(now=lambda: moment))

    at(NOON)
    return at


def placed(queue: Queue, user: User, at: dt.datetime, *waits: int, priority: int = 50) -> None:
    """Runs that started at `at` after waiting so many seconds."""
    runs = [
        Run(queue=queue, user=user, priority=priority, queued_at=at - dt.timedelta(seconds=waited)) for waited in waits
    ]
    history.count_placed(runs, at)


def kpi(page: str, title: str) -> tuple[str, str]:
    """A tile's number and the line below it."""
    found = re.search(rf'{title}</div><div class="kpi">(.*?)</div><div[^>]*>(.*?)</div>', page)
    assert found, f"no tile {title}"
    return found[1], found[2]


def data_of(page: str) -> dict:
    found = re.search(r'<script id="history-data" type="application/json">(.*?)</script>', page)
    assert found
    return json.loads(found[1])


def test_the_numbers_are_of_the_chosen_time_with_today_beside_them(
    project: Project, ann: User, as_user: SignIn
) -> None:
    queue = services.ensure_queue(project)
    placed(queue, ann, NOON, 120, 120, 120)
    placed(queue, ann, NOON - dt.timedelta(hours=20), 300)
    placed(queue, ann, NOON - dt.timedelta(days=2), 7200)
    placed(queue, ann, NOON - dt.timedelta(days=12), 90000)
    found = {}
    for days in (1, 7, 30):
        page = as_user(ann).get(f"/p/main/queues/default/history/?days={days}").content.decode()
        found[days] = kpi(page, "Started"), kpi(page, "P90 wait")[1], sum(data_of(page)["bands"][2]["placed"])
    assert found == {
        1: (("4", "3 today"), "longest 5 min", 4),
        7: (("5", "3 today"), "longest 2 h", 5),
        30: (("6", "3 today"), "longest 1 d 1 h", 6),
    }


def test_a_range_begins_with_its_data_by_the_hour_if_that_is_short(
    project: Project, ann: User, as_user: SignIn
) -> None:
    queue = services.ensure_queue(project)
    placed(queue, ann, NOON - dt.timedelta(days=2), 60)
    page = as_user(ann).get("/p/main/queues/default/history/?days=30").content.decode()
    data = data_of(page)
    assert (data["step"], data["times"][0], len(data["times"])) == ("hour", "2026-11-19T12:00:00Z", 49)
    assert "Data since" in page
    placed(queue, ann, NOON - dt.timedelta(days=20), 60)
    data = data_of(as_user(ann).get("/p/main/queues/default/history/?days=30").content.decode())
    assert (data["step"], len(data["times"])) == ("day", 21)


@pytest.mark.parametrize("path", ["/p/main/history/", "/p/main/queues/default/history/"])
def test_the_last_hour_is_shown_by_five_minutes_beside_the_numbers_of_today(
    project: Project, ann: User, as_user: SignIn, path: str
) -> None:
    queue = services.ensure_queue(project)
    placed(queue, ann, NOON, 120, 120)
    placed(queue, ann, NOON - dt.timedelta(hours=1), 300)
    placed(queue, ann, NOON - dt.timedelta(hours=3), 7200)
    client = as_user(ann)
    page = client.get(f"{path}?hours=1").text
    data = data_of(page)
    assert (data["step"], data["times"][0], len(data["times"])) == ("minutes", "2026-11-21T11:30:00Z", 13)
    assert data["bands"][2]["placed"] == [1, *[0] * 11, 2]
    assert (kpi(page, "Started"), kpi(page, "P90 wait")[1]) == (("3", "4 today"), "longest 5 min")
    assert re.findall(r'href="\?([^"]*)" aria-current="page">\s*1 h<', page) == ["hours=1"]
    assert 'href="?hours=1&amp;as=table"' in page
    table = client.get(f"{path}?hours=1&as=table").text
    assert "Every 5 minutes" in table
    spans = table.partition("dw-hist-table")[2].partition("</table>")[0]
    assert spans.count('<th scope="row"') == 2
    assert "hours=1" in re.findall(r'href="([^"]*history.csv[^"]*)"', page)[0]
    rows = b"".join(client.get("/p/main/history/history.csv?hours=1")).decode().splitlines()
    assert len([row for row in rows if "2026-11-21T11:30" in row or "2026-11-21 11:30" in row]) == 1


def test_data_of_the_last_hour_alone_is_shown_in_half_a_day(project: Project, ann: User, as_user: SignIn) -> None:
    placed(services.ensure_queue(project), ann, NOON, 60)
    assert len(data_of(as_user(ann).get("/p/main/history/").content.decode())["times"]) == 12


def test_an_empty_history_explains_the_page(project: Project, ann: User, as_user: SignIn) -> None:
    page = as_user(ann).get("/p/main/queues/default/history/").content.decode()
    assert "Wait times are recorded when runs start" in page
    assert "history-data" not in page


def test_queue_lengths_without_any_start_are_shown(project: Project, ann: User, as_user: SignIn) -> None:
    queue = services.ensure_queue(project)
    QueueHour.objects.create(queue=queue, band=0, hour=NOON.replace(minute=0), length=3, length_max=5)
    page = as_user(ann).get("/p/main/queues/default/history/").content.decode()
    assert kpi(page, "Median wait") == ("–", "none started today")
    assert kpi(page, "Waiting now") == ("0", "max 5")


def test_days_are_those_of_the_readers_zone(project: Project, ann: User, as_user: SignIn) -> None:
    placed(services.ensure_queue(project), ann, dt.datetime(2026, 11, 20, 23, 30, tzinfo=dt.UTC), 60)
    placed(services.ensure_queue(project), ann, NOON - dt.timedelta(days=20), 60)
    client = as_user(ann)
    address = "/p/main/queues/default/history/?days=30"
    assert data_of(client.get(address).content.decode())["bands"][2]["placed"][-2:] == [1, 0]
    client.cookies["zone"] = "Europe/Berlin"
    data = data_of(client.get(address).content.decode())
    assert (data["zone"], data["bands"][2]["placed"][-2:]) == ("Europe/Berlin", [0, 1])
    assert data["times"][-1] == "2026-11-20T23:00:00Z"


@pytest.mark.parametrize(
    "zone", ["", "Nowhere/At_all", "../etc/passwd", "/etc/passwd", "Europe", "x" * 5000, '"a\\000b"']
)
def test_an_invalid_time_zone_falls_back_to_utc(project: Project, ann: User, as_user: SignIn, zone: str) -> None:
    placed(services.ensure_queue(project), ann, NOON, 60)
    client = as_user(ann)
    cookies = client.cookies.output(header="", sep=";") + f"; zone={zone}"  # as sent: Python's jar may refuse some
    answer = client.get("/p/main/queues/default/history/", headers={"cookie": cookies})
    assert data_of(answer.content.decode())["zone"] == "UTC"


def test_the_table_has_the_values_of_the_chart(project: Project, ann: User, as_user: SignIn) -> None:
    placed(services.ensure_queue(project), ann, NOON, 100, 100, priority=80)
    placed(services.ensure_queue(project), ann, NOON - dt.timedelta(days=20), 60)
    page = as_user(ann).get("/p/main/queues/default/history/?days=30&as=table").content.decode()
    assert "By day (UTC)" in page
    rows = re.findall(r'<tr><th scope="row"[^>]*>2026-11-21</th>(.*?)</tr>', page, re.DOTALL)
    assert [re.sub(r"<.*?>", " ", row).split() for row in rows] == [
        ["75–100", "1", "min", "1", "min", "1", "min", "2", "–", "–"]
    ]
    assert "<canvas" not in page
    assert "data-poll" not in page


def test_history_covers_all_queues_together_and_each_one(project: Project, ann: User, as_user: SignIn) -> None:
    placed(services.ensure_queue(project), ann, NOON, 60)
    placed(services.ensure_queue(project, "night"), ann, NOON, 60, 60)
    page = as_user(ann).get("/p/main/history/").content.decode()
    assert kpi(page, "Started")[0] == "3"
    assert "/p/main/queues/night/history/?days=7" in page
    assert kpi(as_user(ann).get("/p/main/queues/night/history/").content.decode(), "Started")[0] == "2"


def test_the_queues_add_up_to_the_numbers_of_the_tiles_and_are_written_alike(
    project: Project, ann: User, as_user: SignIn
) -> None:
    placed(services.ensure_queue(project), ann, NOON, *[60] * 1029)
    placed(services.ensure_queue(project, "night"), ann, NOON, *[60] * 420)
    page = as_user(ann).get("/p/main/history/").content.decode()
    assert kpi(page, "Started") == ("1,449", "1,449 today")
    (by_queue,) = re.findall(r'aria-label="By queue".*?</table>', page, re.DOTALL)
    started = re.findall(
        r'<th scope="row"[^>]*>(?:\s*<a[^>]*>)?\s*(\w+).*?<td class="num">([\d,]+)</td>\s*<td class="num hide',
        by_queue,
        re.DOTALL,
    )
    assert started == [("default", "1,029"), ("night", "420"), ("All", "1,449")]


def test_strangers_and_unknown_queues_get_404(project: Project, ann: User, as_user: SignIn) -> None:
    assert as_user(make_user("eve")).get("/p/main/queues/default/history/").status_code == 404
    assert as_user(make_user("mal")).get("/p/main/history/").status_code == 404
    assert as_user(ann).get("/p/main/queues/none/history/").status_code == 404


def test_the_history_of_other_projects_is_not_shown(project: Project, ann: User, as_user: SignIn) -> None:
    placed(services.ensure_queue(make_project("other")), ann, NOON, 60)
    assert "history-data" not in as_user(ann).get("/p/main/history/").content.decode()


def test_a_poll_that_has_it_all_gets_nothing(project: Project, ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    first = client.get("/p/main/queues/default/history/", headers=HTMX)
    again = {**HTMX, "HX-PTag": first["HX-PTag"]}
    assert client.get("/p/main/queues/default/history/", headers=again).status_code == 204
    client.cookies["zone"] = "Europe/Berlin"
    assert client.get("/p/main/queues/default/history/", headers=again).status_code == 200


def test_the_queue_page_links_to_its_history(project: Project, ann: User, as_user: SignIn) -> None:
    services.ensure_queue(project, "night")
    page = as_user(ann).get("/p/main/queues/night/").content.decode()
    assert 'href="/p/main/queues/night/history/"' in page


def test_the_page_makes_the_same_queries_for_any_number_of_hours_and_queues(
    project: Project, ann: User, as_user: SignIn
) -> None:
    client = as_user(ann)

    def questions() -> int:
        with CaptureQueriesContext(connection) as asked:
            assert client.get("/p/main/history/?days=30").status_code == 200
        return len(asked)

    placed(services.ensure_queue(project), ann, NOON, 60)
    before = questions()
    for name in ("night", "day", "batch"):
        queue = services.ensure_queue(project, name)
        for hours in range(0, 30 * 24, 24):
            placed(queue, ann, NOON - dt.timedelta(hours=hours), 60)
    assert questions() == before <= 16


def test_a_minute_later_a_poll_gets_the_page_again_since_hours_advance(
    project: Project, ann: User, as_user: SignIn, look_at: Callable[[dt.datetime], None]
) -> None:
    client = as_user(ann)
    first = client.get("/p/main/history/", headers=HTMX)["HX-PTag"]
    look_at(NOON + dt.timedelta(minutes=1))
    assert client.get("/p/main/history/", headers={**HTMX, "HX-PTag": first}).status_code == 200


def test_the_page_of_all_queues_shows_how_often_expected_starts_were_right(
    project: Project, ann: User, as_user: SignIn
) -> None:
    placed(services.ensure_queue(project), ann, NOON, 60)
    client = as_user(ann)
    assert "No start has been compared" in client.get("/p/main/history/").content.decode()
    shown = start_estimates.ShownEstimate(1000.0, 600.0, 900.0, 1620.0, 1920.0)
    start_estimates.score([(shown, 1500.0), (shown, 1700.0), (shown, 1900.0), (shown, 5000.0)])
    page = client.get("/p/main/history/").content.decode()
    assert "75 % had started by the later time shown" in page
    assert "(4 starts)" in page
    assert "25 % where 50 % is right, 75 % where 90 % is right" in page
    assert "up to 15 min" in page
