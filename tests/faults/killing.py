"""Killing a process at each statement it sends to its database, by SIGKILL, as a crash or a power cut would."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal

from django.db import connection, connections

Moment = Literal["before", "after"]


class _Killer:
    """An execute wrapper that ends this process before or after its n-th statement, counted from 1."""

    def __init__(self, number: int, moment: Moment) -> None:
        self.number, self.moment, self.seen = number, moment, 0

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        self.seen += 1
        if self.seen == self.number and self.moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = execute(sql, params, many, context)
        if self.seen == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def is_killed(act: Callable[[], object], number: int, moment: Moment) -> bool:
    """Let a process of its own do `act`, and kill it at its n-th statement; False when it ended before that.

    The parent's connection is closed. AssertionError when `act` raises.
    """
    connections.close_all()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with connection.execute_wrapper(_Killer(number, moment)):
                act()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    _pid, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "it failed by itself; see its output"
    return False


def killed_at_each_statement(act: Callable[[], object], every: int = 1) -> Iterator[tuple[Moment, int]]:
    """Do `act` again and again in processes of their own, each killed one statement later, before it and after it.

    Yields after each kill, and ends when `act` does. `every` second, third … statement only.
    """
    number = 1
    while is_killed(act, number, "before"):
        yield "before", number
        if is_killed(act, number, "after"):
            yield "after", number
        number += every
