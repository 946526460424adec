"""The pages of progress in a browser: readable by everybody, live without reload, and for as long as one likes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import CDPSession, Page, expect

from dstackweb.progress.counters import Delta
from dstackweb.progress.states import TaskState
from tests.browser import progress_demo, task_demo
from tests.browser.conftest import Complaints
from tests.browser.support import check_pages, sign_in

pytestmark = pytest.mark.django_db(transaction=True)
S = TaskState
RUN = "runs/nightly-sweep/progress/"
PAGES = {
    "progress": "progress/",
    "progress-run": RUN,
    "progress-failed-first": f"{RUN}?order=failed",
    "progress-none": f"{RUN}?q=nothing",
    "progress-prefix": f"{RUN}prefix/?prefix=sweep-lr&show=running",
    "progress-failures": f"{RUN}prefix/?prefix=sweep-lr&show=failures",
    "progress-group": f"{RUN}group/?prefix=sweep-lr&group=sweep-lr-3",
    "progress-empty": "runs/export-onnx/progress/",
    "progress-wall": f"{RUN}wall/",
    "progress-wall-light": f"{RUN}wall/?theme=light",
    "progress-card": "runs/nightly-sweep/",
}


def opened(page: Page, base: str, path: str) -> None:
    sign_in(page, base, "mia")
    page.goto(f"{base}/p/main/{path}")


@pytest.mark.nightly
def test_they_are_accessible_in_both_themes_and_widths(live_server, new_page: Callable[..., Page]) -> None:
    progress_demo.build()
    page = new_page(reduced_motion="reduce")
    sign_in(page, live_server.url, "mia")
    check_pages(page, {name: f"{live_server.url}/p/main/{path}" for name, path in PAGES.items()})


def test_bars_move_without_a_reload(live_server, new_page: Callable[..., Page]) -> None:
    scope = task_demo.ensure_scope(progress_demo.build()[1])
    page = new_page()
    opened(page, live_server.url, RUN)
    page.evaluate("window.same = true")
    row = page.locator("tr", has_text="export-onnx")
    hatched = row.locator("rect.pg-no_worker")
    expect(hatched).to_have_attribute("width", "100%")
    expect(row).to_contain_text("40 no worker")
    task_demo.shift(scope, {("export-onnx", "export-onnx-1"): Delta({S.NO_WORKER: -1, S.MEMORY: 1})})
    expect(row).to_contain_text("39 no worker")
    expect(row.locator("rect.pg-memory")).to_have_attribute("width", "2.5%")
    expect(hatched).to_have_attribute("width", "97.5%")
    task_demo.shift(scope, {("brand-new", "brand-new-1"): Delta({S.PROCESSING: 1})})
    expect(page.locator("tr", has_text="brand-new")).to_contain_text("1 running")
    assert page.evaluate("window.same")


def test_the_tooltip_of_a_bar_shows_all_states_and_keeps_counting(live_server, new_page: Callable[..., Page]) -> None:
    scope = task_demo.ensure_scope(progress_demo.build()[1])
    page = new_page()
    opened(page, live_server.url, RUN)
    tip = page.locator(".pg-tip")
    page.locator("tr", has_text="export-onnx").locator(".pg-bar").hover()
    expect(tip).to_contain_text("no worker40100 %")
    task_demo.shift(scope, {("export-onnx", "export-onnx-1"): Delta({S.NO_WORKER: -1, S.FORGOTTEN: 1})})
    expect(tip).to_contain_text("forgotten12.5 %")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.get_by_role("link", name="sweep-lr").focus()
    page.keyboard.press("Shift+Tab")
    expect(tip).to_contain_text("shuffle")


def test_a_lost_server_is_announced_and_caught_up_with(
    live_server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    scope = task_demo.ensure_scope(progress_demo.build()[1])
    page = new_page()
    opened(page, live_server.url, RUN)
    page.context.set_offline(True)
    expect(page.locator("[data-live]")).to_have_attribute("data-state", "lost")
    task_demo.shift(scope, {("export-onnx", "export-onnx-1"): Delta({S.NO_WORKER: -1, S.MEMORY: 1})})
    page.context.set_offline(False)
    expect(page.locator("tr", has_text="export-onnx")).to_contain_text("39 no worker", timeout=15_000)
    expect(page.locator("[data-live]")).to_have_attribute("data-state", "live")
    complaints.remove_failed_loads()


def test_a_wall_counts_hidden_rows_and_reloads_after_a_server_outage(
    live_server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    scope = task_demo.ensure_scope(progress_demo.build()[1])
    page = new_page(viewport={"width": 1280, "height": 480})
    opened(page, live_server.url, f"{RUN}wall/")
    page.evaluate("window.same = true")
    seen = page.locator("[data-wall-rows] tr:visible").count()
    assert 0 < seen < len(task_demo.WORK)
    more = page.locator("[data-wall-more]")
    expect(more).to_have_text(f"{len(task_demo.WORK) - seen} more")
    task_demo.shift(scope, {("train-baseline", "train-baseline-1"): Delta({S.QUEUED: -1, S.MEMORY: 1})})
    expect(page.locator("tr", has_text="train-baseline")).to_contain_text("41,223")
    assert page.locator("[data-wall-rows] tr:visible").count() == seen
    page.set_viewport_size({"width": 1280, "height": 1600})
    expect(more).to_be_hidden()
    page.context.set_offline(True)
    expect(page.locator("[data-live]")).to_have_attribute("data-state", "lost")
    page.context.set_offline(False)
    page.wait_for_function("() => !window.same", timeout=15_000)
    expect(page.locator("tr", has_text="train-baseline")).to_contain_text("41,223")
    complaints.remove_failed_loads()


def test_rows_that_do_not_fit_a_wall_are_counted_below_the_last_row(live_server, new_page: Callable[..., Page]) -> None:
    progress_demo.build()
    page = new_page(viewport={"width": 1280, "height": 480})
    opened(page, live_server.url, f"{RUN}wall/")
    last, more = page.locator("[data-wall-rows] tr:visible").last, page.locator("[data-wall-more]")
    bottom = "row => row.getBoundingClientRect().bottom"
    page.set_viewport_size({"width": 1280, "height": int(last.evaluate(bottom)) + 10})
    page.reload()
    expect(more).to_be_visible()
    assert last.evaluate(bottom) <= more.evaluate("it => it.getBoundingClientRect().top")


@pytest.mark.nightly
def test_the_page_does_not_grow_over_hundreds_of_updates(live_server, new_page: Callable[..., Page]) -> None:
    """Heap and nodes 400 updates later: no more, but for what a heap breathes.

    The least of several looks each time, since the browser collects nodes when it likes; a leak of a node or of half a
    kilobyte with each update would show.
    """
    scope = task_demo.ensure_scope(progress_demo.build()[1])
    page = new_page(keep=False)
    opened(page, live_server.url, RUN)
    page.locator("tr", has_text="evaluate-checkpoint").locator(".pg-bar").hover()
    page.evaluate(UPDATED)
    debugger = page.context.new_cdp_session(page)
    done = 0

    def update(*until: int) -> tuple[float, ...]:
        nonlocal done
        found = []
        for wanted in until:
            while done < wanted:
                back, forth = (S.MEMORY, S.QUEUED) if done % 2 else (S.QUEUED, S.MEMORY)
                moved = Delta({back: -1, forth: 1})
                task_demo.shift(scope, {(name, f"{name}-1"): moved for name in MOVING})
                done += 1
                page.evaluate("done => window.updated(done)", done)
            found.append(measured(debugger))
        return tuple(map(min, zip(*found, strict=True)))

    heap, nodes = update(*range(100, 220, 20))
    heap_after, nodes_after = update(*range(500, 620, 20))
    assert nodes_after <= nodes + 200
    assert heap_after <= heap + 200_000


MOVING = ("train-baseline", "evaluate-checkpoint")
UPDATED = """() => {
  let updates = 0;
  const main = document.getElementById("progress");
  document.addEventListener("htmx:after:request", (event) => {
    if (event.detail.ctx.response?.status === 200) updates += 1;
  });
  window.updated = async (wanted) => {
    while (updates < wanted) {
      main.dispatchEvent(new CustomEvent("poll")); // as polling.js does each second
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  };
}"""


def measured(debugger: CDPSession) -> tuple[float, int]:
    """Bytes of the heap and nodes of the document, once all garbage is gone."""
    for _ in range(2):
        debugger.send("HeapProfiler.collectGarbage")
    counters = debugger.send("Memory.getDOMCounters")
    return debugger.send("Runtime.getHeapUsage")["usedSize"], counters["nodes"]
