"""Programs that report to the real API, over HTTP: what they did stands in the counters, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connections
from django.utils import timezone

from dstackweb.accounts.services import create_token
from dstackweb.progress import selectors
from dstackweb.progress.models import Reporter, Scope, Task, TaskFailure, TaskPrefix
from dstackweb.progress.recount import differences
from dstackweb.progress.states import STATE_OF, TaskState
from dstackweb.runs.launch import tasks_token
from dstackweb.runs.models import Job
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import move_run
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.runner.machines import Gate
from tests.support import REPO, eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def job(transactional_db: None) -> Job:
    """A job that runs."""
    project = make_project("main")
    make_host()
    run = make_run(project, join(project, make_user("ada")), "search")
    place_all()
    return start(placed_job(run))


@pytest.fixture
def env(job: Job, live_server: Any) -> Iterator[dict[str, str]]:
    """What its commands find in their environment."""
    yield environment(job, live_server.url)
    connections.close_all()


def environment(job: Job, url: str) -> dict[str, str]:
    path = f"/api/v1/projects/main/runs/{job.run.uid}/tasks"
    return {"DSTACKWEB_TASKS_URL": url + path, "DSTACKWEB_TASKS_TOKEN": tasks_token(job.pk)}


def program(folder: Path, code: str, env: dict[str, str]) -> subprocess.Popen[str]:
    file = folder / "program.py"
    file.write_text(code)
    return subprocess.Popen(
        [sys.executable, file], env={**os.environ, "PYTHONPATH": str(REPO), **env},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    """What it said on stderr; it must have ended well."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, output + errors
    return errors


def counted(prefix: str) -> dict[str, int]:
    """The prefix's counters that are not 0."""
    row = TaskPrefix.objects.get(name=prefix)
    counts = {state.value: getattr(row, state.value) for state in TaskState}
    assert row.total == sum(counts.values())
    return {state: count for state, count in counts.items() if count}


def kept() -> dict[str, str]:
    return {task.key: STATE_OF[task.state].value for task in Task.objects.all()}


def all_agree() -> None:
    assert list(differences()) == []


def test_a_programs_tasks_and_items_are_counted(env: dict[str, str], tmp_path: Path) -> None:
    code = """
from dstackweb.tracking import task, track, waiting
waiting([f"train-{number}" for number in range(12)])
for number in range(10):
    try:
        with task(f"train-{number}"):
            for item in track(range(100), prefix="step"):
                if number == 7 and item == 30:
                    raise ValueError("diverged")
    except ValueError:
        pass

@task
def clean(): pass

for _ in range(5):
    clean()
with task(("load-a1", 3)):
    pass
"""
    assert finish(program(tmp_path, code, env)) == ""
    assert counted("train") == {"memory": 9, "erred": 1, "released": 2}
    assert counted("step") == {"memory": 930, "released": 70}
    assert counted("clean") == {"memory": 5}
    assert counted("load") == {"memory": 1}
    failure = TaskFailure.objects.get()
    assert failure.key == "train-7"
    assert failure.message.startswith("ValueError: diverged (program.py:")
    step = TaskPrefix.objects.get(name="step")
    assert step.duration_n == 930
    assert Reporter.objects.get().ended_seq is not None
    all_agree()


@pytest.mark.nightly
def test_processes_report_side_by_side(env: dict[str, str], tmp_path: Path) -> None:
    code = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dstackweb.tracking import task, track

@task("train")
def train(number):
    for _ in track(range(200), prefix="step"):
        pass
    return number

if __name__ == "__main__":
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        assert len(list(track(pool.map(train, range(100)), 100, prefix="result"))) == 100
"""
    assert finish(program(tmp_path, code, env)) == ""
    assert counted("train") == {"memory": 100}
    assert counted("step") == {"memory": 20_000}
    assert counted("result") == {"memory": 100}
    all_agree()


def test_a_killed_program_that_is_started_again_loses_and_doubles_nothing(
    env: dict[str, str], tmp_path: Path, job: Job
) -> None:
    code = """
import sys, time
from dstackweb.tracking import flush, task, track, waiting
waiting([f"train-{number}" for number in range(50)])
for number in range(50):
    with task(f"train-{number}"):
        if number == 20 and "{hang}" == "yes":
            flush()
            time.sleep(600)
"""
    process = program(tmp_path, code.replace("{hang}", "yes"), env)
    eventually(lambda: kept().get("train-20") == "processing")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert counted("train") == {"memory": 20, "processing": 1, "waiting": 29}
    killed = Reporter.objects.get()
    assert killed.unfinished == 30
    for later_ms, silent in ((44_000, False), (46_000, True)):
        totals = selectors.of_run(job.run_id, killed.last_ms + later_ms)
        assert totals is not None
        assert (totals.silence is not None) == silent
    assert finish(program(tmp_path, code, env)) == ""
    assert counted("train") == {"memory": 50}
    totals = selectors.of_run(job.run_id, killed.last_ms + 46_000)  # another process has taken its tasks over
    assert totals is not None
    assert totals.silence is None
    assert Scope.objects.get(run_id=job.run_id).tasks == 50
    all_agree()


def test_a_server_gets_all_reports_after_an_outage(job: Job, live_server: Any, tmp_path: Path) -> None:
    gate = Gate(int(urlsplit(live_server.url).port or 0))
    code = """
import sys
from dstackweb.tracking import task
for number in range(2000):
    with task(f"train-{number}"):
        pass
    if number in (10, 1000):
        print(number, flush=True)
        sys.stdin.readline()
"""
    file = tmp_path / "program.py"
    file.write_text(code)
    process = subprocess.Popen(
        [sys.executable, file], env={**os.environ, "PYTHONPATH": str(REPO), **environment(job, gate.url)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    eventually(lambda: kept().get("train-9") == "memory")
    gate.shut()
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()
    gate.open()
    _output, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0, errors
    assert counted("train") == {"memory": 2000}
    all_agree()
    gate.shut()
    connections.close_all()


def test_after_the_attempts_end_nothing_more_is_reported(env: dict[str, str], tmp_path: Path, job: Job) -> None:
    code = """
import sys, time
from dstackweb.tracking import current, flush, task
with task("a-1"):
    assert flush()
    print("there", flush=True)
    sys.stdin.readline()
with task("a-2"):
    assert not flush()
assert current.current_sender().stopped
"""
    file = tmp_path / "program.py"
    file.write_text(code)
    process = subprocess.Popen(
        [sys.executable, file], env={**os.environ, "PYTHONPATH": str(REPO), **env},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    job.run.refresh_from_db()
    move_run(job.run, RunStatus.TERMINATING, now=timezone.now())
    job.run.refresh_from_db()
    move_run(job.run, RunStatus.TERMINATED, now=timezone.now())
    output, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0, output + errors
    assert "tasks are no longer reported; 2 were not counted: 409 the run has ended (terminated)" in errors
    assert set(kept()) == {"a-1"}


def test_a_reporter_outside_the_run_waits_for_its_start_and_follows_its_next_attempt(
    transactional_db: None, live_server: Any, tmp_path: Path
) -> None:
    project = make_project("main")
    make_host()
    ada = join(project, make_user("ada"))
    run = make_run(project, ada, "search", retry={"on_events": ["error"]})
    env = {
        "DSTACKWEB_TASKS_URL": f"{live_server.url}/api/v1/projects/main/runs/search/tasks",
        "DSTACKWEB_TASKS_TOKEN": create_token(ada, "outside")[1],
    }
    code = """
import sys
from dstackweb.tracking import flush, task, track, waiting
def until_reported():
    print("there", flush=True)
    return sys.stdin.readline()
waiting(f"train-{n}" for n in range(11))
for step in track(range(4), prefix="step"):
    if step == 1:
        flush(0.5)
        until_reported()        # the run is started
        assert flush(30)
        until_reported()        # it is retried
        for n in range(5):
            with task(f"train-{n}"):
                pass
        flush(0.5)
        until_reported()        # and started again
        assert flush(30)
"""
    file = tmp_path / "program.py"
    file.write_text(code)
    process = subprocess.Popen(
        [sys.executable, file], env={**os.environ, "PYTHONPATH": str(REPO), **env},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None

    def go_on() -> None:
        process.stdin.write("\n")  # type: ignore[union-attr]  # a pipe
        process.stdin.flush()  # type: ignore[union-attr]  # a pipe

    assert process.stdout.readline() == "there\n"
    assert not Task.objects.exists()
    place_all()
    start(placed_job(run))
    go_on()
    assert process.stdout.readline() == "there\n"
    assert counted("train") == {"waiting": 11}
    assert counted("step") == {"memory": 1, "processing": 1, "waiting": 2}
    run.refresh_from_db()
    move_run(run, RunStatus.TERMINATING, now=timezone.now())
    run.refresh_from_db()
    move_run(run, RunStatus.PENDING, now=timezone.now(), attempt=2)
    go_on()
    assert process.stdout.readline() == "there\n"
    assert not Scope.objects.filter(run_id=run.pk, attempt=2).exists()
    run.refresh_from_db()
    move_run(run, RunStatus.SUBMITTED, now=timezone.now())
    run.refresh_from_db()
    move_run(run, RunStatus.PROVISIONING, now=timezone.now())
    _output, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0, errors
    assert errors == ""
    second = TaskPrefix.objects.filter(scope__attempt=2)
    assert {row.name: (row.memory, row.total) for row in second} == {"train": (5, 5), "step": (4, 4)}
    all_agree()


@pytest.mark.nightly
@pytest.mark.both_sides
def test_forty_concurrent_reporters_all_deliver(env: dict[str, str], tmp_path: Path) -> None:
    code = """
import os, threading, time
from dstackweb.tracking.sender import Sender
URL, TOKEN = os.environ["DSTACKWEB_TASKS_URL"], os.environ["DSTACKWEB_TASKS_TOKEN"]
def work(name):
    sender = Sender(URL, TOKEN)
    for number in range(8):
        sender.event(f"{name}-{number}", "memory")
        while sender.backlog:
            time.sleep(0.02)
        time.sleep(0.3)
    assert sender.close(100)
threads = [threading.Thread(target=work, args=(f"worker{name}",)) for name in range(40)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    process = program(tmp_path, code, env)
    _output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert Scope.objects.get(run_id__gt=0).memory == 320
    all_agree()
