"""A project with runs, one of them with tasks in every state: what the tests of the pages of progress look at."""

from __future__ import annotations

from dstackweb.accounts.models import Project
from dstackweb.runs.models import Run
from tests.browser.demo import PASSWORD
from tests.browser.scene import once
from tests.browser.task_demo import fill
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start


@once
def build() -> tuple[Project, Run]:
    """A project with runs, and one of them with many tasks."""
    project = make_project("main")
    ann = join(project, make_user("ann"))
    join(project, make_user("mia", password=PASSWORD), "admin")
    make_host("box-1", cpus=64, memory_gib=512)
    run = make_run(project, ann, "nightly-sweep")
    for name in ("train-baseline-1", "train-baseline-2", "train-baseline-3", "evaluate-7", "export-onnx"):
        make_run(project, ann, name)
    place_all()
    start(placed_job(run))
    fill(run)
    return project, run
