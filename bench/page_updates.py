"""What a live update costs a browser: CPU time of the page's main thread, in a real Chromium.

    python -m bench.page_updates

Each part of a page that is asked for by itself is measured by itself. Beside it, in the same browser: an answer without
a change, and three drawn frames without any, which each of the other figures contains.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from bench import sides
from standins import programs

UPDATES = 20
COLUMNS = ["elements", "an update, ms", "no change, ms", "no request, ms"]


def measure() -> None:
    """Prints a table of all pages."""
    import django

    django.setup()
    from django.core.management import call_command

    from tests.browser import page_changes

    call_command("collectstatic", interactive=False, verbosity=0)
    rows = {}
    with _served() as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=programs.chromium(), args=["--no-sandbox"])
        for build in page_changes.PAGES:
            call_command("migrate", verbosity=0)
            rows[build.__name__.replace("_", " ")] = _costs(browser, base, build())
            call_command("flush", interactive=False, verbosity=0)
    sides.table("milliseconds of the main thread for", COLUMNS, rows)


def _costs(browser: Browser, base: str, changing: Any) -> list[str]:
    """The cells of one page. `changing`: a `page_changes.Changing`."""
    from tests.browser import page_changes

    context = browser.new_context(viewport={"width": 1360, "height": 900}, locale="en-GB")
    page = context.new_page()
    page_changes.shown(page, base, changing)
    debugger = context.new_cdp_session(page)
    debugger.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_ms() -> float:
        found = debugger.send("Performance.getMetrics")["metrics"]
        return next(1000 * float(one["value"]) for one in found if one["name"] == "TaskDuration")

    def cost(act: Callable[[], object]) -> tuple[float, object]:
        before = busy_ms()
        result = act()
        return busy_ms() - before, result

    def update() -> int:
        return page_changes.update(page, changing.part)

    updates = []
    for number in range(UPDATES):
        changing.change(number)
        took, status = cost(update)
        sides.must_be(status, 200)
        updates.append(took)
    update()  # the alerts of a page may still have something to say
    polls = [cost(update)[0] for _ in range(UPDATES)]
    frames = [cost(lambda: page_changes.draw(page))[0] for _ in range(UPDATES)]
    elements = page.evaluate("document.querySelectorAll('*').length")
    context.close()
    return [f"{elements:,}", *map(sides.cell, (updates, polls, frames))]


@contextmanager
def _served() -> Iterator[str]:
    """The web application in a thread, with its collected files. Yields its address."""
    from django.core.wsgi import get_wsgi_application
    from waitress.server import create_server

    server = create_server(get_wsgi_application(), host="127.0.0.1", port=0, threads=8)
    threading.Thread(target=server.run, daemon=True).start()
    yield f"http://127.0.0.1:{server.effective_port}"
    server.close()


if __name__ == "__main__":
    if sides.here():
        os.environ["DSTACKWEB_STATIC_ROOT"] = f"{os.environ['DSTACKWEB_HOME']}/static"
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # playwright's own loop runs in this thread
        measure()
    else:
        programs.exit_without("bench.page_updates", "chromium")
        sides.on_each_side(["sqlite"])
