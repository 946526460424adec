"""`python -m dstackweb.runner` with its orders as JSON on standard input: detach, take the job's lock, go.

With the word `agent`, a machine's agent instead (`agent.py`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from dstackweb.runner.state import State

LOG_LIMIT = 1 << 20


def main() -> None:
    """Begin as what the arguments say: the runner of one job, or the agent of a machine."""
    if sys.argv[1:2] == ["agent"]:
        from dstackweb.runner import agent

        sys.exit(agent.main(sys.argv[2:]))
    _launch()


def _launch() -> None:
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
    os.umask(0o022)
    _plain_signals()
    state = State(orders["state_dir"])
    _redirect(state, answer)
    if not state.lock():
        _answer(answer, already=True)
        return 0
    from dstackweb.runner.loop import Runner

    try:
        runner = Runner(orders, state)
    except (OSError, ValueError) as error:
        _answer(answer, error=str(error))
        return 1
    _answer(answer, pid=os.getpid())
    runner.run()
    return 0


def _answer(pipe: int, **said: Any) -> None:
    os.write(pipe, json.dumps(said).encode() + b"\n")
    os.close(pipe)


def _plain_signals() -> None:
    """What the launcher ignores or blocks, as servers do with SIGINT, the commands would inherit."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    # Whoever sees the lock may nudge before the handler is there.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


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
    os.close(null)
    os.close(log)
    os.chdir("/")


if __name__ == "__main__":
    main()
