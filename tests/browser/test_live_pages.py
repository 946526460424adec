"""Pages that change by themselves: polls, edits in between, lost connections, logs."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable

import pytest
from django.conf import settings
from django.utils import timezone
from playwright.sync_api import Page, expect

from dstackweb.accounts.models import Project, User
from dstackweb.runs import attempts, logs, services
from dstackweb.runs.models import Job, Run
from dstackweb.wording import units
from tests.browser import demo
from tests.browser.conftest import Complaints
from tests.browser.support import fill_sign_in, sign_in
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db(transaction=True)

# A tab's visibility can't be changed from outside in headless Chromium; the page sees what a hidden tab sees.
HIDEABLE = """
let hidden = false;
Object.defineProperty(document, "hidden", {get: () => hidden});
window.hideTab = (value) => { hidden = value; document.dispatchEvent(new Event("visibilitychange")); };
"""


@pytest.fixture
def project(transactional_db: None) -> Project:
    return make_project("main")


@pytest.fixture
def mia(project: Project) -> User:
    return join(project, make_user("mia", password=demo.PASSWORD), "manager")


@pytest.fixture
def page(live_server, mia: User, new_page: Callable[..., Page]) -> Page:
    """Signed in as a manager."""
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/queue/")
    return page


def names(page: Page) -> list[str]:
    return page.locator(".dw-queue .q-run a").all_text_contents()


def test_the_queue_shows_changes_of_others_and_keeps_typed_input(page: Page, project: Project, mia: User) -> None:
    first, second = make_run(project, mia, "first"), make_run(project, mia, "second")
    page.goto(page.url)
    typed = page.get_by_role("spinbutton", name="Priority of first", exact=True)
    typed.fill("77")
    services.set_priority(second, mia, "manager", 90)
    expect(page.locator(".dw-queue .q-run a").first).to_have_text("second")
    expect(typed).to_have_value("77")
    expect(typed).to_be_focused()
    typed.press("Enter")
    expect(page.get_by_text("Priority of first set to 77")).to_be_visible()
    assert Run.objects.get(pk=first.pk).priority == 77


def test_a_stale_edit_says_what_changed_and_shows_the_list_as_it_is(
    page: Page, project: Project, mia: User, complaints: Complaints
) -> None:
    run = make_run(project, mia, "contested")
    page.goto(page.url)
    typed = page.get_by_role("spinbutton", name="Priority of contested", exact=True)
    typed.fill("77")
    services.set_priority(run, mia, "manager", 20)
    make_run(project, mia, "newer")
    expect(page.get_by_role("link", name="newer")).to_be_visible()  # a poll has come in between
    typed.press("Enter")
    expect(page.get_by_text("contested was changed by mia since you looked")).to_be_visible()
    expect(typed).to_have_value("20")
    assert Run.objects.get(pk=run.pk).priority == 20
    complaints.remove_failed_loads()


def test_a_forbidden_priority_shows_an_error_and_is_reverted(page: Page, project: Project, mia: User) -> None:
    run = make_run(project, mia, "modest")
    page.goto(page.url)
    typed = page.get_by_role("spinbutton", name="Priority of modest", exact=True)
    typed.fill("101")
    typed.blur()
    expect(page.get_by_text("must be less than or equal to 100")).to_be_visible()
    expect(typed).to_have_value("50")
    services.set_priority(run, mia, "manager", 20)
    expect(typed).to_have_value("20")  # and polls show changes again


def test_plus_pressed_three_times_is_one_change_and_the_row_moves(page: Page, project: Project, mia: User) -> None:
    """R24, R26."""
    make_run(project, mia, "first")
    second = make_run(project, mia, "second")
    page.goto(page.url)
    assert names(page) == ["first", "second"]
    raise_it = page.get_by_role("button", name="Raise the priority of second")
    for _ in range(3):
        raise_it.click()
    expect(page.locator(".dw-queue .q-run a").first).to_have_text("second")
    expect(page.get_by_text("position 2 → 1")).to_be_visible()
    expect(raise_it).to_be_focused()
    assert second.events.filter(kind="priority").count() == 1
    assert Run.objects.get(pk=second.pk).priority == 53


def test_stopping_needs_confirmation_and_escape_cancels_it(page: Page, project: Project, mia: User) -> None:
    run = make_run(project, mia, "doomed")
    page.goto(page.url)
    more = page.get_by_role("button", name="Actions for doomed")
    more.click()
    page.get_by_role("menuitem", name="Stop").click()
    expect(page.get_by_role("dialog")).to_contain_text("Cancel doomed?")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    more.click()
    page.get_by_role("menuitem", name="Stop").click()
    page.get_by_role("button", name="Cancel run").click()
    expect(page.get_by_text("doomed ended")).to_be_visible()
    expect(page.get_by_text("No waiting runs")).to_be_visible()
    assert run.events.filter(kind="terminated").count() == 1


def test_a_hidden_tab_does_not_poll_and_catches_up_when_shown(page: Page, project: Project, mia: User) -> None:
    page.goto(page.url)
    page.evaluate(HIDEABLE)
    with page.expect_request(lambda request: request.headers.get("hx-request") == "true"):
        pass
    page.evaluate("hideTab(true)")
    expect(page.locator("[data-live]")).to_have_text("paused")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    make_run(project, mia, "meanwhile")
    page.wait_for_timeout(2600)  # longer than the poll's interval
    assert asked == []
    page.evaluate("hideTab(false)")
    expect(page.get_by_role("link", name="meanwhile")).to_be_visible(timeout=1500)


@pytest.mark.parametrize("kind", ["duration", "elapsed"])
def test_ages_count_on_in_the_words_that_the_server_uses(page: Page, project: Project, kind: str) -> None:
    page.goto(page.url)
    ages = [0, 59, 60, 3599, 3600, 3661, 86399, 86400, 90000, 200000]
    shown = page.evaluate(
        "([url, words, ages]) => import(url).then((times) => ages.map(times[words]))",
        ["/static/js/times.js", f"{kind}Text", ages],
    )
    assert shown == [getattr(units, kind)(age) for age in ages]


def test_the_elapsed_time_of_a_running_run_counts_on_without_the_server(
    live_server, new_page: Callable[..., Page], project: Project, mia: User, complaints: Complaints
) -> None:
    run, now = running(project, mia), timezone.now()
    placed_at = now - dt.timedelta(seconds=603)
    Job.objects.filter(run=run).update(placed_at=placed_at, started_at=now - dt.timedelta(seconds=600))
    Run.objects.filter(pk=run.pk).update(
        submitted_at=placed_at - dt.timedelta(seconds=42), queued_at=placed_at - dt.timedelta(seconds=42)
    )
    page = new_page(keep=False)
    page.clock.install(time=now)
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    status = page.locator("#run-status")
    expect(status).to_have_text(re.compile(r"running\s+10 min \d s"))
    expect(page.locator("#run-steps")).to_have_text(
        re.compile(r"waited\s+42 s.*started in\s+3 s.*running\s+10 min \d s.*End", re.DOTALL)
    )
    page.context.set_offline(True)
    page.clock.run_for(65_000)
    expect(status).to_have_text(re.compile(r"running\s+11 min \d+ s"))
    expect(page.locator("#run-steps")).to_contain_text(re.compile(r"running\s+11 min \d+ s"))
    complaints.remove_failed_loads()


def test_a_lost_connection_is_shown_and_recovers_by_itself(
    page: Page, project: Project, mia: User, complaints: Complaints
) -> None:
    page.goto(page.url)
    live = page.locator("[data-live]")
    expect(live).to_contain_text("updated")
    page.context.set_offline(True)
    expect(live).to_have_text("connection lost, retrying…")
    expect(page.locator("[data-live-say]")).to_have_text("connection lost, retrying…")
    make_run(project, mia, "meanwhile")
    page.context.set_offline(False)
    expect(page.get_by_role("link", name="meanwhile")).to_be_visible()
    expect(live).to_contain_text("updated")
    complaints.remove_failed_loads()


def test_a_failing_server_is_a_lost_connection_too(page: Page, project: Project, complaints: Complaints) -> None:
    page.goto(page.url)
    page.route("**/queue/", lambda route: route.fulfill(status=503, body="down"))
    expect(page.locator("[data-live]")).to_have_text("connection lost, retrying…")
    page.unroute("**/queue/")
    expect(page.locator("[data-live]")).to_contain_text("updated")
    complaints.remove_failed_loads()


def test_a_signed_out_user_is_redirected_to_the_sign_in_page(
    page: Page, project: Project, complaints: Complaints
) -> None:
    page.goto(page.url)
    page.context.clear_cookies()
    page.wait_for_url("**/login/?next=/p/main/queue/")
    complaints.remove_failed_loads()


def test_what_was_typed_when_the_session_ended_is_there_after_the_sign_in(
    page: Page, live_server, project: Project, complaints: Complaints
) -> None:
    join(project, make_user("ann", password=demo.PASSWORD), "manager")
    base = live_server.url
    page.goto(f"{base}/p/main/submit/")
    text = "type: task\ncommands: [echo hello]\n"
    page.context.clear_cookies(name=settings.SESSION_COOKIE_NAME)
    page.get_by_label("Run file", exact=True).fill(text)  # a plan is asked for, and refused
    page.wait_for_url("**/login/?next=/p/main/submit/")
    fill_sign_in(page, "mia", demo.PASSWORD)
    page.wait_for_url("**/p/main/submit/")
    expect(page.get_by_text("What you had typed is here again.")).to_be_visible()
    expect(page.get_by_label("Run file", exact=True)).to_have_value(text)
    expect(page.locator("#result")).to_contain_text("profile default")
    page.reload()
    expect(page.get_by_label("Run file", exact=True)).to_have_value("")

    page.goto(f"{base}/p/main/queues/default/settings/")
    limit = page.get_by_label("Max GPUs in use")
    limit.fill("12")
    page.context.clear_cookies(name=settings.SESSION_COOKIE_NAME)
    page.get_by_role("button", name="Save").first.click()
    fill_sign_in(page, "mia", demo.PASSWORD)
    page.wait_for_url("**/queues/default/settings/")
    expect(limit).to_have_value("12")

    page.context.clear_cookies(name=settings.SESSION_COOKIE_NAME)
    page.get_by_role("button", name="Save").first.click()
    fill_sign_in(page, "ann", demo.PASSWORD)
    page.wait_for_url("**/queues/default/settings/")
    expect(limit).to_have_value("")
    complaints.remove_failed_loads()


def running(project: Project, user: User, **keys: object) -> Run:
    make_host(cpus=8)
    run = make_run(project, user, "talker", **keys)
    place_all()
    start(placed_job(run))
    return run


def test_log_lines_arrive_within_two_seconds_and_any_bytes_are_shown(
    page: Page, live_server, project: Project, mia: User
) -> None:
    job = placed_job(running(project, mia))
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    text = page.locator("[data-log-text]")
    expect(page.locator("[data-log-note]")).to_have_text("No output yet.")
    parts = [
        b"one\n",
        b"caf\xc3",
        b"\xa9\n",
        b"\xff\xfe\x00 raw\n",
        b"10%\r50%\r100%\n",
        b"\x1b[31mred\x1b[0m <b>&\n",
        b"half",
    ]
    for part in parts:
        logs.append_log(job.pk, logs.log_size(job.pk), part)
        page.wait_for_timeout(150)
    expect(text).to_have_text("one\ncafé\n��· raw\n100%\nred <b>&\nhalf", timeout=2000, use_inner_text=True)


def test_hostile_output_is_text_in_its_own_order(page: Page, live_server, project: Project, mia: User) -> None:
    job = placed_job(running(project, mia))
    odd = "\x1b]0;title\x07\x1b]52;c;aGk=\x1b\\a\u202eb\u2066c\x9bd\u200be</pre><script>x</script>{{7*7}}"
    logs.append_log(job.pk, 0, f"{odd}u{chr(0x301) * 50}\n{'x' * 200_000}end".encode())
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    text = page.locator("[data-log-text]")
    expect(text).to_contain_text("the rest of this line is in the download")
    first = text.inner_text().split("\n")[0]
    assert first == f"a·b·c·d·e</pre><script>x</script>{{{{7*7}}}}u{chr(0x301) * 4}…"
    assert len(text.inner_text()) < 70_000  # of a long line the beginning is shown


def test_a_line_of_carriage_returns_does_not_hold_the_page(
    page: Page, live_server, project: Project, mia: User
) -> None:
    job = placed_job(running(project, mia))
    logs.append_log(job.pk, 0, b"begin\n" + b"\r" * 200_000 + b"x\r\r\nend\n")
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    expect(page.locator("[data-log-text]")).to_have_text("begin\nx\nend\n", use_inner_text=True)


def test_a_finished_run_shows_its_end_and_nothing_polls_any_more(
    page: Page, live_server, project: Project, mia: User
) -> None:
    run = running(project, mia)
    job = placed_job(run)
    logs.append_log(job.pk, 0, b"last words\n")
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    attempts.end_job(job.pk, "container_exited_with_error", exit_code=3, message="the command that failed: false")
    expect(page.get_by_text("A command failed. Exit code 3.").first).to_be_visible()
    expect(page.locator("[data-log-note]")).to_have_text("log complete")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.locator("[data-live]")).to_have_text("complete")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2600)  # longer than the poll's interval
    assert asked == []


def test_a_truncated_log_is_marked_as_such_at_its_end(
    page: Page, complaints: Complaints, live_server, project: Project, mia: User
) -> None:
    job = placed_job(running(project, mia))
    logs.append_log(job.pk, 0, b"first words\n")
    attempts.end_job(job.pk, "done_by_runner", exit_code=0, log_size=20)
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    expect(page.locator("[data-log-text]")).to_have_text("first words\n", use_inner_text=True)
    expect(page.locator("[data-log-note]")).to_contain_text("had 20 bytes, and 12 of them are here")
    complaints.remove_failed_loads()


def test_scrolling_up_stops_following_and_the_button_goes_on(
    page: Page, live_server, project: Project, mia: User
) -> None:
    job = placed_job(running(project, mia))
    logs.append_log(job.pk, 0, b"".join(b"line %d\n" % number for number in range(3000)))
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    text, follow = page.locator("[data-log-text]"), page.get_by_role("button", name="Follow")
    expect(text).to_contain_text("line 2999")
    assert "line 500\n" not in (text.inner_text() or "")
    text.evaluate("element => { element.scrollTop = 0; }")
    expect(follow).to_have_attribute("aria-pressed", "false")
    expect(text).to_contain_text("line 0")
    logs.append_log(job.pk, logs.log_size(job.pk), b"line 3000\nline 3001\n")
    below = page.get_by_role("button", name="2 new lines below")
    expect(below).to_be_visible()
    assert text.evaluate("element => element.scrollTop") == 0
    below.click()
    expect(text).to_contain_text("line 3001")
    expect(follow).to_have_attribute("aria-pressed", "true")
    expect(below).to_be_hidden()


def test_each_nodes_log_can_be_chosen(page: Page, live_server, project: Project, mia: User) -> None:
    run = running(project, mia, nodes=2)
    logs.append_log(placed_job(run, 0).pk, 0, b"from node zero\n" * 3000)
    logs.append_log(placed_job(run, 1).pk, 0, b"from node one\n")
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    expect(page.locator("[data-log-text]")).to_contain_text("from node zero")
    page.get_by_role("button", name="node 1", exact=True).click()
    expect(page.locator("[data-log-text]")).to_have_text("from node one\n", use_inner_text=True)
    assert "node=1" in (page.get_by_role("link", name="Download the log").get_attribute("href") or "")
