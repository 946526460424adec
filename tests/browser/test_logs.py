"""The log on a run's page: lines by number, links, colours, search, groups, and logs of any length."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
from playwright.sync_api import Page, expect

from dstackweb.runs import attempts, logs
from dstackweb.runs.models import Job
from tests.browser import demo
from tests.browser.support import sign_in
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start

EDGES = """view => {
    const box = view.getBoundingClientRect();
    const rows = [...view.querySelectorAll(".log-line")];
    const at = y => {
        const row = rows.find(row => row.getBoundingClientRect().bottom > y) ?? rows.at(-1);
        return [Number(row.dataset.line), Math.round((y - row.getBoundingClientRect().top) / 4)];
    };
    return [at(box.top + 2), at(box.bottom - 2)];
}"""
"""The lines at the upper and the lower edge of the view, and how far into each they are."""
pytestmark = pytest.mark.django_db(transaction=True)
LINES = 200_000


@pytest.fixture
def job(transactional_db: None) -> Job:
    project = make_project("main")
    mia = join(project, make_user("mia", password=demo.PASSWORD), "manager")
    make_host(cpus=8)
    run = make_run(project, mia, "talker")
    place_all()
    return start(placed_job(run))


@pytest.fixture
def page(live_server, job: Job, new_page: Callable[..., Page]) -> Page:
    page = new_page()
    sign_in(page, live_server.url, "mia")
    return page


def shown_lines(page: Page) -> list[int]:
    rows = page.locator(".log-line")
    return [int(number) for number in rows.evaluate_all("rows => rows.map(row => row.dataset.line)")]


def test_any_line_of_a_long_log_is_shown_with_its_number(page: Page, live_server, job: Job) -> None:
    """Blocks of 256 KiB, so lines go through their edges."""
    logs.append_log(job.pk, 0, b"".join(b"%d is the text of this line\n" % n for n in range(1, LINES + 1)))
    attempts.end_job(job.pk, "done_by_runner", exit_code=0)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    text = page.locator("[data-log-text]")
    expect(text).to_contain_text(f"{LINES} is the text")
    for place in (0.13, 0.5, 0.77, 0):
        text.evaluate("(view, place) => { view.scrollTop = place * (view.scrollHeight - view.clientHeight); }", place)
        page.wait_for_function(
            "place => Math.abs(document.querySelector('.log-line').dataset.line / 200000 - place) < 0.01", arg=place
        )
        expect(page.locator(".log-coming")).to_have_count(0)
        for row in page.locator(".log-line").all()[:25]:
            assert row.inner_text().strip() == f"{row.get_attribute('data-line')} is the text of this line"
    assert shown_lines(page)[0] == 1
    size = logs.log_size(job.pk)
    fetched = [url for url in asked if "/log/?" in url]
    assert len(fetched) * logs.BLOCK < size / 2  # never the whole log
    assert len(page.locator(".log-line").all()) < 100


def test_lines_are_linked_by_click_and_shift_click(page: Page, live_server, job: Job) -> None:
    logs.append_log(job.pk, 0, b"".join(b"line %d\n" % n for n in range(1, 1001)))
    url = f"{live_server.url}/p/main/runs/talker/"
    page.goto(url + "#L120-L140")
    expect(page.get_by_role("link", name="Line 120", exact=True)).to_be_visible()
    expect(page.locator(".log-marked").first).to_have_text("line 120")
    expect(page.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "false")
    page.get_by_role("link", name="Line 118", exact=True).click()
    assert page.url.endswith("#L118")
    page.get_by_role("link", name="Line 122", exact=True).click(modifiers=["Shift"])
    assert page.url.endswith("#L118-L122")
    expect(page.locator(".log-marked")).to_have_count(5)


def test_search_goes_from_match_to_match(page: Page, live_server, job: Job) -> None:
    words = [b"needle here\n" if n in (7, 40_000, 79_999) else b"hay number %d\n" % n for n in range(80_000)]
    logs.append_log(job.pk, 0, b"".join(words))
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    page.get_by_label("Search the log").fill("NEEDLE")
    found = page.locator("[data-log-found]")
    expect(found).to_have_text("1 / 3")
    for number, line in ((2, 40_001), (3, 80_000), (1, 8)):
        page.get_by_label("Search the log").press("Enter")
        expect(found).to_have_text(f"{number} / 3")
        expect(page.locator(".log-hit-now")).to_have_attribute("data-line", str(line))


def test_groups_close_and_open(page: Page, live_server, job: Job) -> None:
    text = b"before\n::group::Install\none\ntwo\n::endgroup::\nafter\n"
    logs.append_log(job.pk, 0, text)
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    group = page.locator(".log-group")
    expect(group).to_have_text("Install")
    group.click()
    expect(group).to_have_text("Install (3 lines hidden)")
    assert shown_lines(page) == [1, 2, 6]
    group.click()
    expect(group).to_have_attribute("aria-expanded", "true")
    assert shown_lines(page) == [1, 2, 3, 4, 5, 6]


def test_colours_levels_streams_and_times_are_shown(page: Page, live_server, job: Job) -> None:
    lines = [
        b"\x1b[1;31mred\x1b[0m plain\n",
        b"\x1b[38;5;196mcube\x1b[38;2;1;2;3mtrue\n",
        b"2026-01-02 ERROR failed\n",
        b"to stderr, see https://example.org/a?b=1.\n",
    ]
    logs.append_log(job.pk, 0, b"".join(lines))
    starts = [sum(len(line) for line in lines[:at]) for at in range(4)]
    at_ms = 1_750_000_000_123
    marks = b"".join(struct.pack("<QQ", start, at_ms << 2 | (at == 3)) for at, start in enumerate(starts))
    logs.append_marks(job.pk, 0, marks)
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    expect(page.locator(".ansi-bold.ansi-fg-1")).to_have_text("red")
    colours = page.locator(".log-body span").evaluate_all("spans => spans.map(span => span.style.color)")
    assert colours == ["", "rgb(255, 0, 0)", "rgb(1, 2, 3)"]
    expect(page.locator(".log-error")).to_contain_text("ERROR failed")
    expect(page.locator(".log-stderr")).to_contain_text("to stderr")
    link = page.locator(".log-body a")
    assert (link.get_attribute("href"), link.get_attribute("rel")) == (
        "https://example.org/a?b=1", "noopener noreferrer nofollow",
    )  # fmt: skip
    page.get_by_role("button", name="Times").click()
    shown = page.locator(".log-time").first.get_attribute("data-time") or ""
    assert re.fullmatch(r"\d\d:\d\d:40\.123", shown)


def test_a_log_of_one_endless_line_and_many_wrapped_ones_can_be_read_to_its_end(
    page: Page, live_server, job: Job
) -> None:
    logs.append_log(job.pk, 0, b"x" * 3_000_000 + b"\n" + b"".join(b"%d " % n * 300 + b"\n" for n in range(50)))
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    text = page.locator("[data-log-text]")
    expect(text).to_contain_text("49 49")
    assert len(text.inner_text()) < 200_000
    text.focus()
    seen = set(shown_lines(page))
    page.keyboard.press("Home")
    for _ in range(400):
        seen |= set(shown_lines(page))
        if page.get_by_role("button", name="Follow").get_attribute("aria-pressed") == "true":
            break
        page.keyboard.press("ArrowDown")
    assert seen == set(range(1, 52))


def test_the_beginning_of_few_lines_that_wrap_can_be_reached(page: Page, live_server, job: Job) -> None:
    """As many lines would fit into view if each took one row; these take many."""
    logs.append_log(job.pk, 0, b"".join(b"%d " % n * 500 + b"\n" for n in range(1, 13)))
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    text = page.locator("[data-log-text]")
    expect(text).to_contain_text("12 12")
    text.focus()
    page.keyboard.press("Home")
    expect(page.get_by_role("link", name="Line 1", exact=True)).to_be_in_viewport()
    text.hover()
    page.mouse.wheel(0, 400)
    expect(page.get_by_role("link", name="Line 1", exact=True)).not_to_be_in_viewport()
    expect(page.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "false")
    page.goto(f"{live_server.url}/p/main/runs/talker/#L2")
    expect(page.locator(".log-marked")).to_be_in_viewport()


@pytest.mark.parametrize("key", ["PageDown", "PageUp", "wheel down", "wheel up"])
def test_no_line_is_skipped_where_lines_take_many_rows(page: Page, live_server, job: Job, key: str) -> None:
    """Some take one row, some twenty, one more than there is room for."""
    text = b"".join(b"%d " % n * (1 + n * 7 % 500) + b"\n" for n in range(1, 41))
    logs.append_log(job.pk, 0, text + b"word " * 4000 + b"\n")
    page.goto(f"{live_server.url}/p/main/runs/talker/")
    view = page.locator("[data-log-text]")
    expect(view).to_contain_text("word word")
    view.focus()
    down = key in ("PageDown", "wheel down")
    if down:
        page.keyboard.press("Home")
        expect(page.get_by_role("link", name="Line 1", exact=True)).to_be_in_viewport()
    view.hover()
    height, shown = view.evaluate("view => view.clientHeight"), []
    for _ in range(200):
        edges = view.evaluate(EDGES)
        if shown and edges == shown[-1]:
            break
        shown.append(edges)
        if key.startswith("wheel"):
            page.mouse.wheel(0, height * (0.9 if down else -0.9))
            page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        else:
            page.keyboard.press(key)
    assert (shown[-1] if not down else shown[0])[0][0] == 1
    for (top, bottom), (next_top, next_bottom) in pairwise(shown):
        assert tuple(next_top) <= tuple(bottom) if down else tuple(next_bottom) >= tuple(top)
    assert 10 < len(shown) < 100


def test_only_lines_that_came_since_are_counted_as_new(page: Page, live_server, job: Job) -> None:
    logs.append_log(job.pk, 0, text := b"".join(b"line %d\n" % n for n in range(1, 1001)))
    page.goto(f"{live_server.url}/p/main/runs/talker/#L120")
    expect(page.locator(".log-marked")).to_have_text("line 120")
    expect(page.locator(".log-below")).to_be_hidden()
    logs.append_log(job.pk, len(text), b"one\ntwo\n")
    expect(page.locator(".log-below")).to_have_text("2 new lines below")
