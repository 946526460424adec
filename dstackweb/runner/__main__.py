"""`python -m dstackweb.runner` with its orders as JSON on standard input: detach, take the job's lock, go."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from dstackweb.runner.state import State

LOG_LIMIT = 1 << 20


def main() -> None:
    """Detach twice, so that no session and no parent holds the runner; say in one line who has the job now."""
    orders: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        with os.fdopen(read_end) as answer:
            sys.stdout.write(answer.read())
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(read_end)
    status = 1
    try:
        status = _detached(orders, write_end)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _detached(orders: dict[str, Any], answer: int) -> int:
    state = State(orders["state_dir"])
    _redirect(state, answer)
    if not state.lock():
        os.write(answer, b'{"already": true}\n')
        return 0
    os.write(answer, json.dumps({"pid": os.getpid()}).encode() + b"\n")
    os.close(answer)
    from dstackweb.runner.loop import Runner

    Runner(orders, state).run()
    return 0


def _redirect(state: State, keep: int) -> None:
    """No inherited file stays open; what the runner itself has to say goes to a small log."""
    os.closerange(3, keep)
    os.closerange(keep + 1, 65536)
    state.make()
    log = os.open(state.path("runner.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if os.fstat(log).st_size > LOG_LIMIT:
        os.ftruncate(log, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.chdir("/")


if __name__ == "__main__":
    main()
