"""`python -m dstackweb.runner`: starts a runner for each line of standard input, which is its orders as JSON.

With the argument `agent`, the agent of a cloud instance instead (`agent.py`), with `host` that of a joined host.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from typing import Any

from dstackweb.runner import tree
from dstackweb.runner.state import StateDir

LOG_LIMIT = 1 << 20
NO_SUCH_JOB = 404


def main() -> None:
    """Start runners, one for each line of orders, or the agent of a cloud instance or of a host."""
    if sys.argv[1:2] == ["agent"]:
        from dstackweb.runner import agent

        sys.exit(agent.main(sys.argv[2:]))
    if sys.argv[1:2] == ["host"]:
        from dstackweb.runner import host_agent

        sys.exit(host_agent.main(sys.argv[2:]))
    import encodings.idna  # noqa: F401  what all runners share is loaded once

    from dstackweb.runner import loop  # noqa: F401

    tree.protect_memory()  # the tokens of jobs come through here
    gc.freeze()
    for line in sys.stdin.buffer:
        sys.stdout.write(launch(json.loads(line)))
        sys.stdout.flush()


def launch(orders: dict[str, Any]) -> str:
    """Detach a runner by forking twice, so that it has no session or parent; one line with the result."""
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)
        with os.fdopen(read_end) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        return text or "{}\n"
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
    state = StateDir(orders["state_dir"])
    try:
        _redirect(state, answer)
        locked = state.lock()
    except OSError as error:  # a full disk
        _answer(answer, error=str(error))
        return 1
    if not locked:
        _answer(answer, already=True)
        return 0
    if orders.get("probe"):
        return _probe(orders, state, answer)
    from dstackweb.runner.loop import Runner

    try:
        runner = Runner(orders, state)
    except (OSError, ValueError) as error:
        _answer(answer, error=str(error))
        return 1
    _answer(answer, pid=os.getpid())
    runner.run()
    return 0


def _probe(orders: dict[str, Any], state: StateDir, answer: int) -> int:
    """Check what each start needs, its files and the API, by a claim that must fail because there is no such job."""
    from dstackweb.runner.client import Client, Refused, Unreachable

    try:
        nonce = state.nonce()
        client = Client(
            orders["api"], f"jobs/{orders['job']}", orders["token"], nonce, insecure=bool(orders.get("insecure"))
        )
        client.post("claim", {"nonce": nonce, "pid": os.getpid()})
    except (Refused, Unreachable, OSError, ValueError) as error:
        if not isinstance(error, Refused) or error.status != NO_SUCH_JOB:
            _answer(answer, error=str(error))
            return 1
    _answer(answer, pid=os.getpid())
    return 0


def _answer(pipe: int, **answer: Any) -> None:
    os.write(pipe, json.dumps(answer).encode() + b"\n")
    os.close(pipe)


def _plain_signals() -> None:
    """Reset signals that the launcher ignores or blocks, as servers do with SIGINT: commands would inherit that."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    # A nudge may come as soon as the lock is held, before the handler is set.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _redirect(state: StateDir, keep: int) -> None:
    """Close inherited files; the runner's own messages go to a small log."""
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
