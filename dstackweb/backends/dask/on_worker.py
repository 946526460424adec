"""What runs on a Dask worker: one instance's script, in the foreground of a task. Sent by its text.

The worker needs nothing of dstackweb. A guard, a process of its own, starts the script and is the parent of whatever
the script leaves behind; it ends all of that when the task is released, when the worker dies, or with the script.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

TOPIC = "dstackweb"
POLL_S = 0.5
SAID = 400
SUBREAPER = 36
START = "import json,sys; h=json.loads(sys.stdin.readline()); s={}; exec(h['source'],s); s['guard'](**h['order'])"


def run(source: str, key: str, gpu: str, gpu_count: int, script: str, grace_s: float, limit_s: float | None) -> None:
    """The task: returns once no process of the instance is left."""
    from distributed import get_worker

    worker = get_worker()
    if not _is_wanted(worker, key):
        return
    devices = _take(worker, key, gpu, gpu_count)
    worker.log_event(TOPIC, {"key": key, "what": "begun"})
    said = ""
    try:
        env = {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        order = {"script": script, "env": env, "grace_s": grace_s, "limit_s": limit_s}
        said = _guarded(worker, key, json.dumps({"source": source, "order": order}) + "\n")
    except OSError as error:
        said = str(error)
    finally:
        for name in devices:
            _taken(worker).pop(name, None)
        worker.log_event(TOPIC, {"key": key, "what": "ended", "text": said[-SAID:]})


def _guarded(worker: Any, key: str, orders: str) -> str:
    """What the guard says at its end."""
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(orders.encode())
        process.stdin.flush()
        over = select.poll()  # takes any number of a file, which a busy worker has
        over.register(process.stdout, select.POLLIN | select.POLLHUP)
        while _is_wanted(worker, key) and not over.poll(POLL_S * 1000):
            pass
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        said = process.stdout.read().decode(errors="replace")
        process.wait()
    return said


def _is_wanted(worker: Any, key: str) -> bool:
    """Whether the scheduler still wants the task, and the worker stays."""
    task = worker.state.tasks.get(key)
    if task is None or worker.status.name in ("closing", "closed", "failed"):
        return False
    return task.state not in ("cancelled", "resumed", "released", "forgotten")


def _taken(worker: Any) -> dict[str, str]:
    """Devices of the worker that have a task, by name."""
    taken: dict[str, str] = vars(worker).setdefault("_dstackweb_devices", {})
    return taken


def _take(worker: Any, key: str, gpu: str, count: int) -> list[str]:
    """GPUs of the worker for a task: those in its CUDA_VISIBLE_DEVICES, or as many as its resource says."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    amount = int(worker.state.total_resources.get(gpu, 0))
    names = named[:amount] if named else [str(number) for number in range(amount)]
    found: list[str] = []
    for name in names if count else ():
        if len(found) < count and _taken(worker).setdefault(name, key) == key:
            found.append(name)
    return found


# The guard, in a process of its own.


def guard(script: str, env: dict[str, str], grace_s: float, limit_s: float | None) -> None:
    """Run the script until it ends, its time is over, or nothing holds this standard input; then end all of it."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    stops: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    file, said = os.memfd_create("script"), os.memfd_create("said")
    os.write(file, script.encode())
    process = subprocess.Popen(
        ["/bin/sh", f"/proc/self/fd/{file}"], pass_fds=(file,), stdin=subprocess.DEVNULL, stdout=said,
        stderr=subprocess.STDOUT, env={**os.environ, **env},
    )  # fmt: skip
    ends = None if limit_s is None else time.monotonic() + limit_s
    while process.pid not in _reap() and not stops:
        left = None if ends is None else ends - time.monotonic()
        if left is not None and left <= 0:
            break
        ready = select.select([0, woken], [], [], left)[0]
        if woken in ready:
            os.read(woken, 4096)
        if 0 in ready:
            break
    _end_all(grace_s)
    size = os.fstat(said).st_size
    sys.stdout.write(os.pread(said, SAID, max(0, size - SAID)).decode(errors="replace"))


def _reap() -> list[int]:
    """Children that have ended."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended.append(pid)
    return ended


def _end_all(grace_s: float) -> None:
    """SIGTERM to all processes below this one, and SIGKILL to what is left after the grace."""
    _signal(_below(), signal.SIGTERM)
    until = time.monotonic() + grace_s
    while _reap() or _below():
        left = _below()
        if time.monotonic() > until:
            _signal(left, signal.SIGKILL)
        time.sleep(0.05)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _below() -> list[int]:
    """All descendants of this process: what loses its parent becomes its child."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    found, parents = [], [os.getpid()]
    while parents:
        parents = [child for parent in parents for child in children.get(parent, ())]
        found += parents
    return found
