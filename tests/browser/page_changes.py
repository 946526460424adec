"""Live pages with something on them that changes: what an update costs a browser is tested and measured with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from playwright.sync_api import Page

from dstackweb.progress.counters import Delta
from dstackweb.progress.states import TaskState as S
from dstackweb.runs import files, services
from dstackweb.runs.models import Run
from tests.browser import demo, gpu_demo, progress_demo, task_demo
from tests.browser.support import settle, sign_in
from tests.factories import make_run, placed_job


class Changing(NamedTuple):
    """A page of the project `main`, the part of it that is polled, and what changes there, each time in another way."""

    path: str
    polled: str
    change: Callable[[int], object]


def queue() -> Changing:
    """The queue with a full page of rows, the last of which gets to the top."""
    project, mia = demo.build()
    runs = [make_run(project, mia, f"more-{number}", resources={"gpu": 1}) for number in range(40)]
    return Changing(
        "queue/", "#queue", lambda number: services.set_priority(runs[-1 - number % 40], mia, "manager", 90)
    )


def running_run() -> Changing:
    """A running run with tasks, GPUs and a log, which writes while its priority changes."""
    project, mia = demo.build()
    run = project.runs.get(name="train-llama-sft")
    job = placed_job(run)

    def change(number: int) -> None:
        files.append_log(job.pk, files.log_size(job.pk), b"step %d loss 0.1\n" % number)
        services.set_priority(Run.objects.get(pk=run.pk), mia, "manager", 10 + number)

    return Changing(f"runs/{run.name}/", "[data-poll]", change)


def progress() -> Changing:
    """Eleven bars, three of which change."""
    _project, run = progress_demo.build()
    scope = task_demo.ensure_scope(run)

    def change(_number: int) -> None:
        moved = Delta({S.QUEUED: -1, S.MEMORY: 1})
        task_demo.shift(
            scope, {(name, f"{name}-1"): moved for name in ("train-baseline", "evaluate-checkpoint", "shuffle")}
        )

    return Changing(f"runs/{run.name}/progress/", "#progress", change)


def gpus() -> Changing:
    """The map of all GPUs, with new samples of a host."""
    gpu_demo.build()
    return Changing("gpus/", "[data-poll]", lambda number: gpu_demo.seen("box-1", g3=40 + number, g1=20 + number))


PAGES = (queue, running_run, progress, gpus)


def shown(page: Page, base: str, path: str) -> None:
    """The page, drawn, with its own polls too far apart to get in the way."""
    sign_in(page, base, "mia")
    page.goto(f"{base}/p/main/{path}")
    page.wait_for_load_state("networkidle")
    page.evaluate("for (const one of document.querySelectorAll('[data-poll]')) one.dataset.poll = 3600")
    update(page, "[data-poll]")  # the one that was due
    settle(page)


def update(page: Page, polled: str) -> int:
    """Poll this part of the page, and wait until what changed is drawn. Returns the status of the answer."""
    return int(page.evaluate(_UPDATE, polled))


_UPDATE = """async (selector) => {
  const polled = document.querySelector(selector);
  const status = await new Promise((done) => {
    const end = ({ detail: { ctx } }) => {
      if (ctx.sourceElement !== polled) return;
      document.removeEventListener("htmx:finally:request", end);
      done(ctx.response?.status);
    };
    document.addEventListener("htmx:finally:request", end);
    dispatchEvent(new Event("online")); // polls are due at once
  });
  for (let frame = 0; frame < 3; frame += 1) await new Promise(requestAnimationFrame);
  return status;
}"""
