"""The pages of progress: what they show, and that a poll gets what has changed and nothing else."""

from __future__ import annotations

import datetime as dt
import html
import json
import re
from collections.abc import Callable

import pytest
from django.conf import settings
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.sessions import NOTED_S
from dstackweb.progress import counters, ingest, selectors as progress
from dstackweb.progress.counters import Delta
from dstackweb.progress.models import Scope, TaskFailure, TaskPrefix
from dstackweb.progress.reports import Batch, Event, Failure
from dstackweb.progress.selectors import Stuck
from dstackweb.progress.states import TaskState
from dstackweb.runs import attempts, stuck
from dstackweb.runs.learned_durations import RUNS_MIN
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.services import ensure_queue
from dstackweb.runs.shared_rows import touch
from dstackweb.runs.states import Reason
from dstackweb.runs.stuck import stuck_runs
from dstackweb.web.progress import live as progress_live, scope as progress_scope, views as progress_views
from dstackweb.wording.sentence import visible
from tests.browser.task_demo import shift
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start
from tests.web.conftest import HTMX

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
S = TaskState
NOW_MS = 1_800_000_000_000
PAGE = "runs/sweep/progress/"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The pages' clock, which tests move on by milliseconds."""
    at = [NOW_MS]
    for module in (progress_live, progress_views, progress_scope):
        monkeypatch.setattr(module, "now_ms", lambda: at[0])

    def later(ms: int) -> None:
        at[0] += ms

    return later


@pytest.fixture
def client(ann: User, as_user: SignIn, clock: Callable[[int], None]) -> Client:
    return as_user(ann)


@pytest.fixture
def run(project: Project, ann: User) -> Run:
    make_host("box-1")
    run = make_run(project, ann, "sweep")
    place_all()
    start(placed_job(run))
    return Run.objects.get(pk=run.pk)


@pytest.fixture
def scope(run: Run) -> int:
    """Two prefixes, nothing of which has finished yet."""
    scope = counters.ensure_scope(run.project_id, run.pk, 1)
    report(scope, train={S.PROCESSING: 2, S.QUEUED: 8})
    report(scope, test={S.WAITING: 5})
    return scope


def report(scope: int, at_ms: int = NOW_MS, **moved: dict[TaskState, int]) -> None:
    """Tasks of prefixes, in a group for each."""
    shift(scope, {(prefix, f"{prefix}-1"): Delta(states) for prefix, states in moved.items()}, at_ms)


def page(client: Client, path: str = PAGE) -> str:
    answer = client.get(f"/p/main/{path}")
    assert answer.status_code == 200, answer.content.decode()[:500]
    return answer.content.decode()


def poll(client: Client, shown: HttpResponse | None = None, path: str = PAGE) -> HttpResponse:
    """As a page that shows this answer asks."""
    headers = HTMX | ({"HX-PTag": shown["HX-PTag"]} if shown is not None else {})
    answer: HttpResponse = client.get(f"/p/main/{path}", headers=headers)
    return answer


def rows(answer: HttpResponse | str) -> list[str]:
    """The names in it, in order."""
    text = answer if isinstance(answer, str) else answer.content.decode()
    return re.findall(r'<tr id="pg-\d+"><th scope="row"><a [^>]*><bdi>([^<]*)</bdi></a>', text)


def test_a_run_shows_all_its_prefixes_with_their_states(client: Client, scope: int) -> None:
    report(scope, train={S.QUEUED: -1, S.ERRED: 1}, test={S.WAITING: -5, S.NO_WORKER: 5})
    text = page(client)
    assert rows(text) == ["train", "test"]
    assert "2\N{NO-BREAK SPACE}running · 7\N{NO-BREAK SPACE}queued" in text
    assert 'aria-label="test: 0 of 5 finished; 5 no worker"' in text
    assert "5\N{NO-BREAK SPACE}no worker" in text


def test_a_run_with_as_many_prefixes_as_are_counted_says_what_becomes_of_further_ones(
    client: Client, scope: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice = "Further ones of a Dask scheduler are counted together"
    assert notice not in page(client)
    monkeypatch.setattr(progress, "PREFIXES_MAX", 2)
    assert notice in page(client)
    assert notice not in page(client, "progress/"), "a project's runs have any number of prefixes"


def test_failed_counts_link_to_the_error_messages(client: Client, scope: int) -> None:
    report(scope, train={S.QUEUED: -1, S.ERRED: 1})
    why = f'href="/p/main/{PAGE}prefix/?prefix=train&amp;show=failures"'
    assert why in page(client)
    assert why in page(client, f"{PAGE}prefix/?prefix=train")
    assert why in page(client, f"{PAGE}group/?prefix=train&group=train-1")
    assert "prefix=train&amp;show=failures" in page(client, "runs/sweep/")
    assert f'href="/p/main/{PAGE}?order=failed"' in page(client)


def test_failures_of_forgotten_tasks_still_link_to_the_error_messages(client: Client, run: Run) -> None:
    scope = counters.ensure_scope(run.project_id, run.pk, 1)
    ingest.ingest_batch(
        scope, Batch("dask", failures=(Failure("train-7", "train", "train-1", 1, "out of memory"),)), NOW_MS
    )
    report(scope, train={S.FORGOTTEN: 5}, test={S.FORGOTTEN: 5})
    (link,) = re.findall(r'<a href="([^"]*)">some failed</a>', page(client))
    assert "out of memory" in page(client, html.unescape(link).removeprefix("/p/main/"))


def test_an_ended_dask_run_still_shows_how_its_tasks_ended(client: Client, scope: int) -> None:
    done = {S.FORGOTTEN_DONE: 57, S.FORGOTTEN_FAILED: 3}
    report(scope, score=done, train={S.PROCESSING: -2, S.QUEUED: -8, S.FORGOTTEN_DONE: 10})
    text = page(client, f"{PAGE}?order=failed")
    assert rows(text)[0] == "score"
    assert "67 done" in text
    assert 'prefix=score&amp;show=failures">3\N{NO-BREAK SPACE}failed</a>' in text
    assert "60 <span>/ 60" in text
    assert "forgotten</span>" not in text
    assert rows(page(client, f"{PAGE}prefix/?prefix=score&show=failed")) == ["score-1"]
    assert rows(page(client, f"{PAGE}prefix/?prefix=train")) == ["train-1"]
    assert 'class="pg-erred"' in page(client, f"{PAGE}group/?prefix=score&group=score-1")


def test_forgotten_tasks_are_not_shown_as_done(client: Client, scope: int) -> None:
    report(scope, gone={S.FORGOTTEN: 5})
    text = page(client)
    assert "5 forgotten" in text
    assert " done<" not in text


def test_a_poll_of_an_unchanged_page_gets_204(client: Client, scope: int) -> None:
    first = client.get(f"/p/main/{PAGE}")
    with CaptureQueriesContext(
        connection,
    ) as asked:
        assert poll(client, first).status_code == 204
    assert sum("progress_" in query["sql"] for query in asked) == 1


def test_a_poll_gets_the_rows_that_changed_and_no_others(client: Client, scope: int) -> None:
    first = client.get(f"/p/main/{PAGE}")
    report(scope, test={S.WAITING: -1, S.PROCESSING: 1})
    answer = poll(client, first)
    assert rows(answer) == ["test"]
    assert answer["HX-Reswap"] == "none"
    raw = Client()  # each space beside the row would stay in the table
    raw.cookies = client.cookies
    update = poll(raw, first).content.decode()
    assert re.search(r'<hx-partial hx-target="#pg-[^>]*><tr .*</tr></hx-partial>', update, re.DOTALL)
    assert b"1 running" in answer.content
    assert poll(client, answer).status_code == 204


def test_missed_changes_come_with_the_next_poll(client: Client, scope: int) -> None:
    """A hidden tab, or an answer that was lost."""
    first = client.get(f"/p/main/{PAGE}")
    report(scope, test={S.WAITING: -1, S.PROCESSING: 1})
    report(scope, train={S.QUEUED: -1, S.PROCESSING: 1})
    assert rows(poll(client, first)) == ["train", "test"]


def test_a_changed_set_of_rows_sends_the_whole_list(client: Client, scope: int) -> None:
    first = client.get(f"/p/main/{PAGE}")
    report(scope, export={S.QUEUED: 1})
    answer = poll(client, first)
    assert rows(answer) == ["train", "test", "export"]
    assert "HX-Reswap" not in answer


def test_finished_prefixes_are_listed_after_active_ones(client: Client, scope: int) -> None:
    first = client.get(f"/p/main/{PAGE}")
    report(scope, train={S.PROCESSING: -2, S.QUEUED: -8, S.MEMORY: 10})
    assert rows(poll(client, first)) == ["test", "train"]


def test_rates_fade_though_nothing_changes(client: Client, scope: int, clock: Callable[[int], None]) -> None:
    report(scope, train={S.PROCESSING: -2, S.MEMORY: 2})
    first = client.get(f"/p/main/{PAGE}")
    clock(1000 * progress_live.RATES_S)
    second = poll(client, first)
    assert rows(second) == ["train"]  # of the other nothing has finished, nor has it a rate
    clock(1000)
    assert poll(client, second).status_code == 204
    clock(6 * 3600 * 1000)
    text = poll(client, second).content.decode()
    assert "nothing finished recently" in text
    clock(10_000)
    assert rows(poll(client, second)) == []  # only the time left goes on


def test_a_new_attempt_is_shown_as_a_whole(client: Client, scope: int, run: Run) -> None:
    first = client.get(f"/p/main/{PAGE}")
    again = counters.ensure_scope(run.project_id, run.pk, 2)
    report(again, train={S.QUEUED: 3})
    Scope.objects.filter(pk=again).update(version=Scope.objects.get(pk=scope).version)
    Run.objects.filter(pk=run.pk).update(attempt=2)
    text = poll(client, first).content.decode()
    assert rows(text) == ["train"]
    assert "/ 3" in text
    assert "attempt=1" in text
    old = page(client, f"{PAGE}?attempt=1")
    assert rows(old) == ["train", "test"]
    assert "prefix=train&amp;attempt=1" in old


def test_a_run_without_reports_shows_how_to_report_and_then_its_first_task(client: Client, run: Run) -> None:
    assert "::task key=" in page(client)
    assert poll(client).status_code == 204
    report(counters.ensure_scope(run.project_id, run.pk, 1), train={S.QUEUED: 1})
    assert rows(poll(client)) == ["train"]


def test_the_page_of_a_run_that_ended_without_tasks_stops_polling(client: Client, run: Run) -> None:
    assert "data-poll-over" not in page(client)
    Run.objects.filter(pk=run.pk).update(status="done")
    text = page(client)
    assert "reported no tasks" in text
    assert "data-poll-over" in text


def test_an_attempt_without_reports_links_to_the_others(client: Client, scope: int, run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(attempt=2)
    text = page(client, f"{PAGE}?attempt=2")
    assert "::task key=" in text
    assert "attempt=1" in text


def test_a_runs_page_links_to_its_progress(client: Client, run: Run) -> None:
    assert f'href="/p/main/runs/{run.uid}/progress/"' in page(client, "runs/sweep/")


def test_a_page_stops_polling_after_the_end(client: Client, scope: int, run: Run) -> None:
    Scope.objects.filter(pk=scope).update(ended_ms=NOW_MS)
    Run.objects.filter(pk=run.pk).update(status="done")
    assert "data-poll-over" not in page(client)  # what was live is yet to be released
    report(scope, train={S.PROCESSING: -2, S.QUEUED: -8, S.RELEASED: 10}, test={S.WAITING: -5, S.RELEASED: 5})
    for path in (PAGE, f"{PAGE}prefix/?prefix=train", f"{PAGE}group/?prefix=train&group=train-1"):
        assert "data-poll-over" in page(client, path)
    assert "the run has ended" in page(client)
    assert "all finished" not in page(client)


def test_prefixes_are_found_by_a_part_of_their_name_and_put_in_order(client: Client, scope: int) -> None:
    report(scope, test={S.WAITING: -1, S.ERRED: 1}, abc={S.QUEUED: 1})
    assert rows(page(client, f"{PAGE}?q=ES")) == ["test"]
    assert rows(page(client, f"{PAGE}?order=failed")) == ["test", "train", "abc"]
    assert rows(page(client, f"{PAGE}?order=name")) == ["abc", "test", "train"]
    assert "No matching prefixes" in page(client, f"{PAGE}?q=nothing")


def test_long_lists_have_pages(client: Client, scope: int) -> None:
    report(scope, **{f"p{n:03}": {S.QUEUED: 1} for n in range(60)})
    text = page(client)
    assert len(rows(text)) == 50
    assert "50 of 62 prefixes" in text
    following = re.search(r'rel="next" href="([^"]*)"', text)
    assert following
    more = client.get(following[1].replace("&amp;", "&")).content.decode()
    assert len(rows(more)) == 12
    assert "First page" in more


@pytest.mark.parametrize("path", [PAGE, f"{PAGE}prefix/?prefix=train", f"{PAGE}prefix/?prefix=train&show=failures"])
def test_a_page_of_the_list_that_never_was_one_is_refused(client: Client, scope: int, path: str) -> None:
    for after in ("x", "1.x", f"0.{10**40}"):
        answer = client.get(f"/p/main/{path}{'&' if '?' in path else '?'}after={after}")
        assert answer.status_code == 422


@pytest.mark.parametrize(
    "path",
    ["?attempt=-4", "?attempt=9" + 30 * "9", "?q=%00", "?order=name&after=0.99", "wall/?q=%25_", "prefix/?prefix=%00",
     "prefix/?prefix=train&q=%00", "group/?prefix=train&group=%00", f"prefix/?prefix={300 * 'x'}"],
)  # fmt: skip
def test_no_address_breaks_a_page(client: Client, scope: int, path: str) -> None:
    for headers in ({}, HTMX):
        assert client.get(f"/p/main/{PAGE}{path}", headers=headers).status_code in (200, 204, 404)


NAMES = (
    '"><script>alert(1)</script>', "a/../../b/", "..", "?q=1&show=failures#x", "%2e%2f%00", "tâche ✓ 仕事", "x" * 200,
    "</hx-partial><b>", "{{ 7 }}", "javascript:alert(1)", " ", "\u202egpj", "-", "\n",
)  # fmt: skip


def test_names_chosen_by_commands_are_escaped_and_their_links_work(ann: User, clock: object, scope: int) -> None:
    client = Client()  # line breaks in names are part of them
    client.force_login(ann)
    events = [Event(name, TaskState.ERRED, 1, name, name, message=f"{name}<i>") for name in NAMES]
    ingest.ingest_batch(scope, Batch("r", events=tuple(events)), NOW_MS)
    links = re.findall(
        r'<th scope="row">\s*<a href="([^"]*)"[^>]*><bdi>([^<]*)</bdi></a>', page(client, f"{PAGE}?order=failed")
    )
    where = {html.unescape(name): html.unescape(href) for href, name in links}
    assert where.keys() >= set(map(visible, NAMES))
    assert where.keys() > {"␣", "[U+202E]gpj", "␊"}
    for name in NAMES:
        for path in (where[visible(name)], f"{where[visible(name)]}&show=failures"):
            answer = client.get(path)
            assert answer.status_code == 200
            found = answer.content.decode()
            assert "<script>alert" not in found
            assert "<i>" not in found
            assert html.escape(visible(name)) in found
        assert client.get(f"/p/main/{PAGE}group/", {"prefix": name, "group": name}).status_code == 200


@pytest.mark.parametrize("stamp", [f"{5000 * '9'}-1-1-x", "1-2-3", "²-1-1-x", "---"])
def test_a_page_with_an_unknown_version_gets_everything(client: Client, scope: int, stamp: str) -> None:
    answer = client.get(f"/p/main/{PAGE}", headers=HTMX | {"HX-PTag": stamp})
    assert rows(answer) == ["train", "test"]


def test_a_killed_reporter_is_shown_as_silent_without_a_time_left(
    client: Client, scope: int, run: Run, clock: Callable[[int], None]
) -> None:
    batch = Batch("r", (Event("load-1", S.PROCESSING, 1, "load", "load", message="file 3"),), heartbeat_s=15)
    ingest.ingest_batch(scope, batch, NOW_MS)
    report(scope, train={S.PROCESSING: -2, S.MEMORY: 2})
    first = client.get(f"/p/main/{PAGE}")
    assert "No report since" not in first.content.decode()
    assert "file 3" in page(client, f"{PAGE}group/?prefix=load&group=load")
    clock(46_000)
    update = poll(client, first)
    assert "No report since" in update.content.decode()
    assert rows(update) == ["train"]
    assert "08:00 UTC" in update.content.decode()
    assert poll(client, update).status_code == 204
    for path in (f"{PAGE}prefix/?prefix=load", f"{PAGE}wall/", f"{PAGE}card/"):
        assert "no report since" in page(client, path)
    ingest.ingest_batch(scope, Batch("r", heartbeat_s=15), NOW_MS + 46_000)
    assert "No report since" not in poll(client, update).content.decode()
    assert "no report since" not in page(client, f"{PAGE}card/")


def test_a_project_shows_its_runs_and_the_prefixes_of_running_ones(client: Client, scope: int) -> None:
    text = page(client, "progress/")
    assert "Tasks of running runs" in text
    assert rows(text) == ["sweep"]
    assert re.search(r'<tr id="pg-run-\d+".*?0 <span>/ 15', text, re.DOTALL)
    Run.objects.update(status="done")
    assert "Tasks of running runs" not in page(client, "progress/")


def test_the_progress_of_a_project_says_paused_and_leaves_out_impossible_runs(
    client: Client, project: Project, ann: User
) -> None:
    make_host("box-1", cpus=2)
    for name in ("wide-1", "wide-2"):
        make_run(project, ann, name, resources={"cpu": 64})
    place_all()
    first = poll(client, path="progress/")
    assert "(2 impossible)" in first.content.decode()
    assert "impossible" in first.content.decode().partition("Time left")[2][:300]
    make_run(project, ann, "narrow-1")
    Queue.objects.update(paused=True)
    touch(Queue.objects.get().pk)
    found = poll(client, first, path="progress/").content.decode()
    assert "(1 paused)" in found
    assert re.search(r"Time left</div><div class=\"kpi\">paused</div>.*1 paused, 2 impossible", found, re.DOTALL)


def test_of_a_partly_paused_project_the_prefixes_of_paused_runs_say_so(
    client: Client, project: Project, ann: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(project, ann, "open-1")
    ensure_queue(project, "night")
    for number in range(3):
        make_run(project, ann, f"held-{number}", queue="night")
    Queue.objects.filter(name="night").update(paused=True)
    assert stuck_runs(project).by_prefix == {"held": Stuck(3, 0)}
    assert "(3 paused)" in page(client, "progress/")
    monkeypatch.setattr(stuck, "MOST", 1)
    stuck.forget()
    bars = {bar.name: bar for bar in progress.prefixes(Scope.objects.get(run_id=0).pk, NOW_MS)[1]}
    assert stuck_runs(project).of(bars["held"]) == Stuck(3, 0)


def test_how_long_runs_took_is_a_column_once_enough_have_ended(client: Client, project: Project, ann: User) -> None:
    make_host()
    now = timezone.now()
    for number in range(RUNS_MIN):
        run = make_run(project, ann, f"train-{number}")
        place_all()
        start(placed_job(run))
        Run.objects.filter(pk=run.pk).update(started_at=now - dt.timedelta(seconds=100 if number else 1000))
        attempts.end_job(placed_job(run).pk, Reason.DONE_BY_RUNNER, exit_code=0)
        text = page(client, "progress/")
        assert "Mean duration" in text
        assert ("p50" in text) == (number == RUNS_MIN - 1)
    assert re.search(r"p50 1 min · p95 1[0-9] min", text), re.findall("p50[^<]*", text)


def test_how_long_tasks_inside_a_run_took_is_shown_as_well(client: Client, scope: int) -> None:
    for number in range(5):
        assert "p50" not in page(client)
        timed = Event(f"load-{number}", S.MEMORY, 1, "load", "load", duration_s=10 if number else 100)
        ingest.ingest_batch(scope, Batch("r", (timed,)), NOW_MS)
    assert re.search(r"p50 (9|10|9\.\d|10\.\d) s · p95 (1 min|1[0-2]\d s|[89]\d s)", page(client)), re.findall(
        "p50[^<]*", page(client)
    )


def test_prefixes_inside_runs_are_sent_again_only_after_a_change(client: Client, scope: int) -> None:
    path = "progress/inside/"
    first = poll(client, path=path)
    assert first.status_code == 200
    assert poll(client, first, path).status_code == 204
    report(scope, train={S.QUEUED: -1, S.PROCESSING: 1})
    assert b"3 running" in poll(client, first, path).content


def test_a_project_without_runs_shows_a_message(client: Client) -> None:
    assert "No runs yet" in page(client, "progress/")


def test_a_prefix_shows_its_groups(client: Client, scope: int) -> None:
    shift(
        scope, {("train", f"train-{n}"): Delta({S.ERRED: 1} if n == 3 else {S.MEMORY: 1}, 1, 2.0) for n in range(2, 5)}
    )
    path = f"{PAGE}prefix/?prefix=train"
    first = client.get(f"/p/main/{path}")
    text = first.content.decode()
    assert rows(text) == ["train-1", "train-2", "train-3", "train-4"]
    assert "2.0 s" in text
    assert rows(page(client, f"{path}&show=failed")) == ["train-3"]
    assert '/progress/prefix/?prefix=train&amp;show=failures">1\xa0failed</a>' in page(client, f"{path}&show=failed")
    assert rows(page(client, f"{path}&show=running")) == ["train-1"]
    assert rows(page(client, f"{path}&q=-2")) == ["train-2"]
    report(scope, train={S.PROCESSING: -1, S.MEMORY: 1})
    assert rows(poll(client, first, path)) == ["train-1"]


def test_groups_of_a_project_link_to_its_runs(client: Client, run: Run) -> None:
    assert "/p/main/runs/?q=sweep" in page(client, "progress/prefix/?prefix=sweep")


def test_failed_tasks_are_shown_with_their_messages(client: Client, scope: int) -> None:
    prefix = TaskPrefix.objects.get(name="train")
    for n, message in enumerate(("out of <memory>", "")):
        TaskFailure.objects.create(
            scope_id=scope, prefix=prefix, key=f"train-1-{n}", group="train-1", message=message, seq=1, at_ms=NOW_MS - n
        )
    path = f"{PAGE}prefix/?prefix=train&show=failures"
    first = client.get(f"/p/main/{path}")
    text = first.content.decode()
    assert "out of &lt;memory&gt;" in text
    assert text.index("train-1-0") < text.index("train-1-1")
    TaskFailure.objects.create(
        scope_id=scope, prefix=prefix, key="train-1-9", group="train-1", message="later", seq=1, at_ms=NOW_MS + 5
    )
    report(scope, train={S.PROCESSING: -1, S.ERRED: 1})
    assert b"later" in poll(client, first, path).content


def test_a_group_reported_as_counts_only_says_so(client: Client, scope: int) -> None:
    text = page(client, f"{PAGE}group/?prefix=train&group=train-1")
    assert "These tasks were reported as counts" in text


@pytest.mark.parametrize("what", ["prefix/?prefix=nope", "group/?prefix=train&group=nope", "prefix/"])
def test_a_missing_prefix_or_group_is_404_and_its_open_page_reloads(client: Client, scope: int, what: str) -> None:
    assert client.get(f"/p/main/{PAGE}{what}").status_code == 404
    assert poll(client, path=f"{PAGE}{what}")["HX-Refresh"] == "true"


def test_a_wall_screen_is_dark_unless_requested_otherwise(client: Client, scope: int) -> None:
    text = page(client, f"{PAGE}wall/")
    assert 'data-bs-theme="dark"' in text
    assert "dw-side" not in text
    assert rows(text) == ["train", "test"]
    assert 'data-bs-theme="light"' in page(client, f"{PAGE}wall/?theme=light")
    assert "No runs yet" not in page(client, "progress/wall/")


def test_an_open_wall_page_keeps_its_user_signed_in(client: Client, scope: int) -> None:
    """Its polls put the session's end off, once in a while: most write nothing."""
    renewed = [settings.SESSION_COOKIE_NAME in client.get(f"/p/main/{PAGE}wall/", headers=HTMX).cookies]
    session = client.session
    session["used"] -= NOTED_S
    session.save()
    for _ in range(2):
        renewed.append(settings.SESSION_COOKIE_NAME in client.get(f"/p/main/{PAGE}wall/", headers=HTMX).cookies)
    assert renewed == [False, True, False]


def test_a_wall_is_updated_by_rows_too(client: Client, scope: int) -> None:
    first = client.get(f"/p/main/{PAGE}wall/")
    report(scope, test={S.WAITING: -1, S.PROCESSING: 1})
    assert rows(poll(client, first, f"{PAGE}wall/")) == ["test"]


def test_a_runs_page_has_a_card_of_its_tasks_once_there_are_some(client: Client, run: Run) -> None:
    before = client.get("/p/main/runs/sweep/")
    assert "run-tasks" not in before.content.decode()
    scope = counters.ensure_scope(run.project_id, run.pk, 1)
    report(scope, train={S.QUEUED: 3})
    answer = poll(client, before, "runs/sweep/")
    assert 'id="run-tasks"' in answer.content.decode()
    report(scope, train={S.QUEUED: -1, S.PROCESSING: 1})
    again = poll(client, answer, "runs/sweep/")
    assert again.status_code == 204  # the card asks for itself, and learns when
    assert json.loads(again["DW-Parts"])["run-tasks"] != json.loads(answer["DW-Parts"])["run-tasks"]
    card = poll(client, path="runs/sweep/progress/card/")
    assert b"1 running" in card.content
    assert b'data-poll="15"' in card.content
    assert poll(client, card, "runs/sweep/progress/card/").status_code == 204


def test_strangers_see_nothing_of_it(scope: int, as_user: SignIn) -> None:
    eve = as_user(make_user("eve"))
    for path in (
        "progress/",
        "progress/wall/",
        "progress/inside/",
        PAGE,
        f"{PAGE}card/",
        f"{PAGE}prefix/?prefix=train",
    ):
        assert eve.get(f"/p/main/{path}").status_code == 404


def test_another_projects_run_is_not_found_in_this_one(client: Client, scope: int, ann: User) -> None:
    other = Project.objects.create(name="other")
    join(other, ann)
    assert client.get(f"/p/other/{PAGE}").status_code == 404
