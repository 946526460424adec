"""Whole programs that report: how they end, their children, and what a server does that is away or slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers import free_port
from tests.support import REPO, eventually
from tests.tracking.ear import Ear


def start(folder: Path, code: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """A program of its own file, as spawned children need it."""
    program = folder / "program.py"
    program.write_text(code)
    return subprocess.Popen(
        # From 3.12 on Python warns of each fork beside threads, which is what some of these programs are about.
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", program],
        env={**os.environ, "PYTHONPATH": str(REPO), **env},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(folder: Path, code: str, env: dict[str, str]) -> str:
    """What it wrote to stderr; it must end well."""
    process = start(folder, code, env)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output + errors
    return errors


def test_the_last_reports_are_delivered_when_the_program_exits(ear: Ear, tmp_path: Path) -> None:
    code = """
from dstackweb.tracking import task, track
for item in track(range(5)):
    with task(f"step-{item}"):
        pass
with task("last"):
    raise SystemExit(0)
"""
    assert run(tmp_path, code, ear.env) == ""
    assert ear.states() == {**{f"step-{number}": "memory" for number in range(5)}, "last": "released"}
    assert ear.counts("items") == {"memory": 5}
    assert len(ear.reporters) == 1
    assert ear.ended == ear.reporters


def test_a_failing_program_reports_its_failed_tasks(ear: Ear, tmp_path: Path) -> None:
    code = """
from dstackweb.tracking import task
with task("load-1"):
    open("/nowhere")
"""
    process = start(tmp_path, code, ear.env)
    _output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.endswith("FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'\n")
    event = ear.events()["load-1"]
    assert event["state"] == "erred"
    assert "No such file or directory: '/nowhere' (program.py:4, in <module>)" in event["message"]
    assert ear.ended == ear.reporters


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_report_for_themselves(ear: Ear, tmp_path: Path, method: str) -> None:
    code = f"""
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dstackweb.tracking import flush, task, track, waiting

@task("train")
def train(number):
    return number

def work(name):
    for item in track(range(10), prefix="rows"):
        with task(f"{{name}}-{{item}}"):
            pass

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    waiting(f"a-{{number}}" for number in range(10))
    for item in track(range(10), prefix="rows"):  # children start while it is under way
        if item == 5:
            processes = [context.Process(target=work, args=(name,)) for name in "ab"]
            for process in processes:
                process.start()
            with ProcessPoolExecutor(2, context) as pool:
                assert list(pool.map(train, range(20))) == list(range(20))
            for process in processes:
                process.join()
                assert process.exitcode == 0
"""
    assert run(tmp_path, code, ear.env) == ""
    states = ear.states()
    assert {key: state for key, state in states.items() if not key.startswith("train-")} == {
        f"{name}-{number}": "memory" for name in "ab" for number in range(10)
    }
    assert [state for key, state in states.items() if key.startswith("train-")] == ["memory"] * 20
    assert ear.counts("rows") == {"memory": 30}
    assert len(ear.reporters) in (4, 5)  # one of the pool may have had all the work
    assert ear.ended == ear.reporters


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_last_work_of_terminated_pool_workers_is_reported(ear: Ear, tmp_path: Path, method: str) -> None:
    code = f"""
import multiprocessing
from dstackweb.tracking import task, track

@task("train")
def train(number):
    for _ in track(range(10), prefix="step"):
        pass
    return number

if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(2) as pool:  # which is terminated as the block is left
        assert pool.map(train, range(50)) == list(range(50))
"""
    assert run(tmp_path, code, {**ear.env, "TMPDIR": str(tmp_path)}) == ""
    assert list(ear.states().values()) == ["memory"] * 50
    assert ear.counts("step") == {"memory": 500}
    assert ear.ended == ear.reporters
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("dstackweb")] == []


def test_a_child_that_is_killed_is_ended_by_its_parent(ear: Ear, tmp_path: Path) -> None:
    code = """
import multiprocessing, os, signal, time
from dstackweb.tracking import flush, task

def work():
    for number in range(100):
        with task(f"train-{number}"):
            pass
    with task("hang-1"):
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
"""
    assert run(tmp_path, code, {**ear.env, "TMPDIR": str(tmp_path)}) == ""
    assert ear.states() == {**{f"train-{number}": "memory" for number in range(100)}, "hang-1": "processing"}
    assert len(ear.reporters) == 1
    assert ear.ended == ear.reporters  # so that the server releases what hung


def test_without_a_temporary_directory_a_child_works_and_reports(ear: Ear, tmp_path: Path) -> None:
    code = """
import multiprocessing, tempfile
from dstackweb.tracking import task

def work():
    with task("train-1"):
        pass

def nowhere():
    raise FileNotFoundError("No usable temporary directory")

if __name__ == "__main__":
    tempfile.gettempdir = nowhere
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    assert run(tmp_path, code, ear.env) == ""
    assert ear.states() == {"train-1": "memory"}
    assert ear.ended == ear.reporters


def test_a_running_program_forwards_reports_of_its_pool(ear: Ear, tmp_path: Path) -> None:
    code = """
import multiprocessing, sys
from dstackweb.tracking import current, flush, task
current.CHILDREN_EVERY_S = 0

@task
def train(number):
    return number

if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        pool.map(train, range(50))
    pool.join()
    with task("further"):
        flush()
    print("there", flush=True)
    sys.stdin.read()
"""
    process = start(tmp_path, code, {**ear.env, "TMPDIR": str(tmp_path)})
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    states = ear.states()
    assert states.pop("further") == "processing"
    assert list(states.values()) == ["memory"] * 50
    assert len(ear.ended) == len(ear.reporters) - 1
    process.communicate(timeout=30)
    assert ear.ended == ear.reporters


def test_a_fork_amid_a_block_and_a_loop_leaves_both_to_the_parent(ear: Ear, tmp_path: Path) -> None:
    code = """
import os, sys
from dstackweb.tracking import flush, task, track
for item in track(range(3)):
    with task(f"outer-{item}"):
        flush()
        pid = os.fork()
        if pid == 0:
            with task(f"child-{item}"):
                pass
            sys.exit(7)
        assert os.waitpid(pid, 0)[1] == 7 << 8
"""
    assert run(tmp_path, code, ear.env) == ""
    assert ear.states() == {f"{name}-{number}": "memory" for name in ("outer", "child") for number in range(3)}
    assert ear.counts("items") == {"memory": 3}
    assert len(ear.ended) == len(ear.reporters) == 4


def test_a_child_forked_during_a_report_is_not_blocked(ear: Ear, tmp_path: Path) -> None:
    code = """
import os, signal, sys, threading
from dstackweb.tracking import current, task, track
held, over = threading.Event(), threading.Event()
def report():
    with current.current_sender().lock:
        held.set()
        over.wait()
loop = track(range(3))
next(loop)
with task("outer-1"):
    threading.Thread(target=report).start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        loop.close()
        sys.exit(7)
    over.set()
    assert os.waitpid(pid, 0)[1] == 7 << 8
list(loop)
"""
    assert run(tmp_path, code, ear.env) == ""
    assert ear.states() == {"outer-1": "memory"}
    assert ear.counts("items") == {"memory": 3}


def test_a_loop_that_a_forks_child_begins_is_the_childs(ear: Ear, tmp_path: Path) -> None:
    code = """
import os, sys
from dstackweb.tracking import flush, task, track
with task("before"):
    flush()
loop = track(range(3))
pid = os.fork()
if pid == 0:
    assert list(loop) == [0, 1, 2]
    sys.exit(7)
assert os.waitpid(pid, 0)[1] == 7 << 8
"""
    assert run(tmp_path, code, ear.env) == ""
    assert ear.counts("items") == {"memory": 3}
    assert len(ear.ended) == len(ear.reporters) == 2


def test_threads_that_fork_while_others_report_do_not_hang(ear: Ear, tmp_path: Path) -> None:
    code = """
import os, threading
from dstackweb.tracking import flush, task, track
over = threading.Event()
def busy():
    while not over.is_set():
        for item in track(range(100)):
            with task("busy"):
                pass
threads = [threading.Thread(target=busy) for _ in range(4)]
for thread in threads:
    thread.start()
for number in range(30):
    pid = os.fork()
    if pid == 0:
        for item in track(range(2), prefix="child"):
            with task(f"child-{number}"):
                pass
        os._exit(0 if flush(30) else 1)
    assert os.waitpid(pid, 0)[1] == 0
over.set()
"""
    assert run(tmp_path, code, ear.env) == ""
    assert ear.counts("child") == {"memory": 60}
    assert {f"child-{number}" for number in range(30)} <= set(ear.states())


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_sending_thread_imports_nothing(ear: Ear, tmp_path: Path, scheme: str) -> None:
    """A child that is forked amid an import finds it locked for ever, or half done."""
    code = """
import sys, threading
from dstackweb.tracking import current, flush, task
main, found = threading.main_thread(), []
def heard(event, args):
    if event == "import" and threading.current_thread() is not main:
        found.append(args[0])
sys.addaudithook(heard)
with task("one"):
    pass
flush(1)
current.close(0.1)
print(found)
"""
    env = ear.env | {"DSTACKWEB_TASKS_URL": ear.url.replace("http", scheme).replace("127.0.0.1", "localhost")}
    output, _errors = start(tmp_path, code, env).communicate(timeout=60)
    assert output == "[]\n"


def test_the_reports_of_a_killed_program_are_kept(ear: Ear, tmp_path: Path) -> None:
    code = """
import time
from dstackweb.tracking import task, waiting
waiting(["a-1", "a-2"])
with task("a-1"):
    time.sleep(600)
"""
    process = start(tmp_path, code, ear.env)
    eventually(lambda: ear.states() == {"a-1": "processing", "a-2": "waiting"})
    process.kill()
    process.communicate()
    assert not ear.ended
    again = code.replace("time.sleep(600)", "pass")
    assert run(tmp_path, again, ear.env) == ""
    assert ear.states() == {"a-1": "memory", "a-2": "waiting"}  # reported by another reporter, later
    assert len(ear.reporters) == 2


def test_an_unreachable_server_costs_one_warning_and_a_short_wait(tmp_path: Path) -> None:
    code = """
import atexit
from dstackweb.tracking import current, task, track
atexit.register(current.close, 1)
for item in track(range(1000)):
    with task(f"step-{item}"):
        pass
print("worked")
"""
    began = time.monotonic()
    url = f"http://127.0.0.1:{free_port()}/tasks"
    errors = run(tmp_path, code, {"DSTACKWEB_TASKS_URL": url, "DSTACKWEB_TASKS_TOKEN": "secret"})
    assert time.monotonic() - began < 30
    first, last = errors.splitlines()
    assert first.startswith(f"cannot report tasks to {url}, will retry (ConnectionRefusedError: ")
    assert last == "1001 tasks or groups were not reported"


@pytest.mark.slow
def test_a_server_that_never_answers_is_waited_for_a_few_seconds_at_the_end(ear: Ear, tmp_path: Path) -> None:
    ear.hold.clear()
    began = time.monotonic()
    errors = run(tmp_path, "from dstackweb.tracking import task\nwith task('a'): pass\n", ear.env)
    assert time.monotonic() - began < 30
    assert "cannot report tasks to" in errors or "no response in time" in errors


def test_the_work_does_not_wait_for_a_slow_server(ear: Ear, tmp_path: Path) -> None:
    ear.hold.clear()
    code = """
import time
from dstackweb.tracking import task
began = time.monotonic()
for item in range(20_000):
    with task(f"step-{item}"):
        pass
print(time.monotonic() - began)
"""
    process = start(tmp_path, code, ear.env)
    assert process.stdout is not None
    assert float(process.stdout.readline()) < 30
    ear.hold.set()
    process.communicate(timeout=30)
    assert len(ear.states()) == 20_000


def test_an_interrupted_program_reports_its_end(ear: Ear, tmp_path: Path) -> None:
    code = """
import signal, time
from dstackweb.tracking import task
signal.signal(signal.SIGINT, signal.default_int_handler)  # which programs in the background ignore
with task("a-1"):
    time.sleep(600)
"""
    process = start(tmp_path, code, ear.env)
    eventually(lambda: ear.states() == {"a-1": "processing"})
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert ear.states() == {"a-1": "released"}
    assert ear.ended == ear.reporters
