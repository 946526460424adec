"""Live pages with something on them that changes: what an update costs a browser is tested and measured with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from playwright.sync_api import Page

from dstackweb.progress.counters import Delta
from dstackweb.progress.states import TaskState as S
from dstackweb.runs import logs, services
from dstackweb.runs.models import Run
from tests.browser import demo, gpu_demo, progress_demo, task_demo
from tests.browser.support import settle, sign_in
from tests.factories import make_run, placed_job


class Changing(NamedTuple):
    """A page of the project `main`, the part that is updated, and what changes there, each time in another way."""

    path: str
    part: str
    change: Callable[[int], object]


def queue() -> Changing:
    """The queue with a full page of rows, the last of which gets to the top."""
    project, mia = demo.build()
    runs = [make_run(project, mia, f"more-{number}", resources={"gpu": 1}) for number in range(40)]
    return Changing(
        "queue/", "#queue", lambda number: services.set_priority(runs[-1 - number % 40], mia, "manager", 90)
    )


def running_run() -> Changing:
    """The page of a running run, whose priority changes. Its tasks, GPUs and log are updated by themselves."""
    project, mia = demo.build()
    run = project.runs.get(name="train-llama-sft")
    return Changing(
        f"runs/{run.name}/",
        "#run",
        lambda number: services.set_priority(Run.objects.get(pk=run.pk), mia, "manager", 10 + number),
    )


def log_of_a_run() -> Changing:
    """A log in view that gets a line."""
    project, _mia = demo.build()
    run = project.runs.get(name="train-llama-sft")
    job = placed_job(run)
    return Changing(
        f"runs/{run.name}/",
        "#run-log",
        lambda number: logs.append_log(job.pk, logs.log_size(job.pk), b"step %d loss 0.1\n" % number),
    )


def tasks_of_a_run() -> Changing:
    """A run's tasks in short."""
    return _of_tasks("", "#run-tasks")


def progress() -> Changing:
    """Eleven bars."""
    return _of_tasks("progress/", "#progress")


def _of_tasks(page: str, part: str) -> Changing:
    """A page of a run with tasks, of which three prefixes get on."""
    _project, run = progress_demo.build()
    scope = task_demo.ensure_scope(run)
    moved = Delta({S.QUEUED: -1, S.MEMORY: 1})
    at = {(name, f"{name}-1"): moved for name in ("train-baseline", "evaluate-checkpoint", "shuffle")}
    return Changing(f"runs/{run.name}/{page}", part, lambda _number: task_demo.shift(scope, at))


def gpus_of_a_run() -> Changing:
    """The charts of a run's GPUs."""
    return _of_gpus("runs/train-llama-sft/", "#run-gpus")


def gpus() -> Changing:
    """The map of all GPUs."""
    return _of_gpus("gpus/", "[data-poll]")


def _of_gpus(path: str, part: str) -> Changing:
    """A page about GPUs, with new samples of a host."""
    gpu_demo.build()
    return Changing(path, part, lambda number: gpu_demo.seen("box-1", g3=40 + number, g1=20 + number))


PAGES = (queue, running_run, log_of_a_run, tasks_of_a_run, gpus_of_a_run, progress, gpus)


def shown(page: Page, base: str, changing: Changing) -> None:
    """The page, drawn."""
    sign_in(page, base, "mia")
    page.goto(f"{base}/p/main/{changing.path}")
    page.wait_for_load_state("networkidle")
    update(page, changing.part)  # the one that was due
    settle(page)


def update(page: Page, part: str) -> int:
    """Ask for this part of the page alone, and wait until what changed is drawn. Returns the status of the answer."""
    return int(page.evaluate(_UPDATE, part))


def draw(page: Page) -> None:
    """Three frames, as after an update."""
    page.evaluate("async () => { for (let frame = 0; frame < 3; frame += 1) await new Promise(requestAnimationFrame) }")


_UPDATE = """async (selector) => {
  const part = document.querySelector(selector);
  for (const other of document.querySelectorAll("[data-poll]")) if (other !== part) other.removeAttribute("data-poll");
  const status = await new Promise((done) => (part.dataset.log ? askForLog : poll)(part, done));
  for (let frame = 0; frame < 3; frame += 1) await new Promise(requestAnimationFrame);
  return status;

  function poll(part, done) {
    part.dataset.poll = 3600; // it must not ask by itself as well
    const end = ({ detail: { ctx } }) => {
      if (ctx.sourceElement !== part) return;
      document.removeEventListener("htmx:finally:request", end);
      done(ctx.response?.status);
    };
    document.addEventListener("htmx:finally:request", end);
    dispatchEvent(new Event("online")); // polls are due at once
  }

  function askForLog(part, done) {
    const answers = new PerformanceObserver((list) => {
      const found = list.getEntries().find(({ name }) => name.includes(part.dataset.log));
      if (!found) return;
      answers.disconnect();
      done(found.responseStatus);
    });
    answers.observe({ type: "resource" });
    part.dispatchEvent(new Event("changed"));
  }
}"""
