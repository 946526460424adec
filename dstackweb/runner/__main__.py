"""`python -m dstackweb.runner` with its orders as JSON on standard input: detach, take the job's lock, go.

Prints {"pid": N} once the detached runner holds the lock, or {"already": true} when another does, and returns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from dstackweb.runner.client import check_address
from dstackweb.runner.detach import detached
from dstackweb.runner.orders import parse_orders
from dstackweb.runner.state import State
from dstackweb.runner.tree import hide_memory


def main() -> int:
    """Returns the exit status: 2 for orders that can't be followed, 1 when the runner died before it had the lock."""
    hide_memory()
    try:
        orders = parse_orders(sys.stdin.buffer.read())
        check_address(orders.api)
    except ValueError as error:
        sys.stderr.write(f"dstackweb.runner: {error}\n")
        return 2
    state = State(orders.state_dir)
    state.make()

    def run(say: Callable[[bytes], None]) -> None:
        from dstackweb.runner.loop import Runner
        from dstackweb.runner.wake import Wake

        wake = Wake()
        if not state.lock():
            say(b'{"already": true}')
            return
        say(json.dumps({"pid": os.getpid()}).encode())
        Runner(orders, state, wake).run()

    answer = detached(run, state.path("runner.log"))
    if not answer:
        sys.stderr.write(f"dstackweb.runner: it could not begin; see {state.path('runner.log')}\n")
        return 1
    sys.stdout.write(answer.decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
