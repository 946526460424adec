"""`task` reports one task when it starts and when it ends; `track` counts the items of an iterable."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from dstackweb.tracking.client import plain_text
from dstackweb.tracking.current import current_sender
from dstackweb.tracking.sender import Sender

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Counts = tuple[int, dict[str, int], int, float]
"""Number of the sender's attempt changes, states, timed items, and their total seconds."""

_calls = itertools.count(1)


class TaskContext:
    """Returned by `task`: a context manager (also asynchronous) for one task, or a decorator: each call is a task.

    The task is done when the block ends; failed, with the exception's text, when it raises; released when it is
    cancelled, closed early or interrupted. Exceptions propagate. Use one object for one block at a time.
    """

    __slots__ = ("_began", "_pid", "_sender", "group", "key", "prefix")

    def __init__(self, key: str | tuple[Any, ...], prefix: str | None = None, group: str | None = None) -> None:
        self.key = plain_text(key)
        self.prefix = None if prefix is None else plain_text(prefix)
        self.group = None if group is None else plain_text(group)

    def __enter__(self) -> TaskContext:
        self._sender: Sender | None = current_sender()
        if self._sender is not None:
            self._pid = os.getpid()
            self._sender.event(self.key, "processing", self.prefix, self.group)
            self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sender = self._sender
        if sender is None or self._pid != os.getpid():  # a forked child leaves its parent's block
            return
        duration_s = time.perf_counter() - self._began
        if error is None:
            sender.event(self.key, "memory", self.prefix, self.group, duration_s)
        elif _is_failure(error):
            sender.event(self.key, "erred", self.prefix, self.group, duration_s, describe(error))
        else:
            sender.event(self.key, "released", self.prefix, self.group)

    async def __aenter__(self) -> TaskContext:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Make each call of `function` a task named after this key. Also for generators and coroutines."""
        return cast(F, _each_call(function, self.key, self.prefix or self.key, self.group))


@overload
def task(key: F, /) -> F: ...
@overload
def task(key: str | tuple[Any, ...], *, prefix: str | None = None, group: str | None = None) -> TaskContext: ...
def task(
    key: str | tuple[Any, ...] | Callable[..., Any], *, prefix: str | None = None, group: str | None = None
) -> Any:
    """Report one task: `with task("train-17"):`, or `@task` or `@task("clean")` before a function.

    `key` names the task, unique within an attempt of the run; a tuple (name, …) belongs to the group `name`. Prefix and
    group default to those of the key: `train-17` belongs to `train`. Without DSTACKWEB_TASKS_URL and
    DSTACKWEB_TASKS_TOKEN nothing is reported.
    """
    if isinstance(key, (str, tuple)):
        return TaskContext(key, prefix, group)
    if callable(key):
        name = getattr(key, "__name__", type(key).__name__)
        return _each_call(key, name, name, None)
    raise TypeError(f"a task's key must be a string or a tuple, not {type(key).__name__}")


def waiting(keys: Iterable[str | tuple[Any, ...]], *, prefix: str | None = None, group: str | None = None) -> None:
    """Report tasks that have not started, so that the bar shows the total."""
    sender = current_sender()
    if sender is not None:
        for key in keys:
            one = TaskContext(key, prefix, group)
            sender.event(one.key, "waiting", one.prefix, one.group)


def describe(error: BaseException) -> str:
    """An exception in one line: type, text, and where it was raised."""
    name = type(error).__name__
    try:
        text = f"{name}: {error}" if str(error) else name
    except Exception:  # an exception's own __str__ may fail
        text = name
    trace = error.__traceback__
    if trace is None:
        return text
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{text[:1800]} ({os.path.basename(code.co_filename)}:{trace.tb_lineno}, in {code.co_name})"


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception)  # not CancelledError, GeneratorExit or KeyboardInterrupt


def _each_call(function: Callable[..., Any], name: str, prefix: str, group: str | None) -> Any:
    def one() -> TaskContext:
        sender = current_sender()
        mark = sender.reporter[-8:] if sender is not None else ""
        return TaskContext(f"{name}-{mark}-{next(_calls)}", prefix, group or prefix)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with one():
                return await function(*args, **kwargs)

        return awaited
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def awaiting(*args: Any, **kwargs: Any) -> Any:
            with one():
                items = function(*args, **kwargs)
                with contextlib.suppress(StopAsyncIteration):  # as `yield from` does in plain generators
                    item = await items.asend(None)
                    while True:
                        try:
                            sent = yield item
                        except GeneratorExit:
                            await items.aclose()
                            raise
                        except BaseException as error:
                            item = await items.athrow(error)
                        else:
                            item = await items.asend(sent)

        return awaiting
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generated(*args: Any, **kwargs: Any) -> Any:
            with one():
                return (yield from function(*args, **kwargs))

        return generated

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with one():
            return function(*args, **kwargs)

    return called


def track(
    iterable: Iterable[T], total: int | None = None, *, prefix: str = "items", group: str | None = None
) -> Iterator[T]:
    """Iterate over `iterable`, and report how many items are done, running and waiting.

    `total`: number of items, for an iterable without a length. `prefix` names the bar; `group` is a part of it and
    defaults to the prefix. An item is done when the next one is requested. When the loop is left early, the remaining
    items are released; when the iterable raises, one item has failed. Loops with the same prefix and group are counted
    together, within a process and across processes.
    """
    if current_sender() is None:
        return iter(iterable)
    return _walk(iterable, _Progress(_length(iterable, total)), (plain_text(prefix), plain_text(group or prefix)))


def _length(iterable: Iterable[object], total: int | None) -> int:
    """Expected number of items, 0 when unknown. Exceptions of a program's own `__len__` are ignored."""
    try:
        return int(length_hint(iterable) if total is None else total)
    except Exception:
        return 0


class _Progress:
    """One loop. The iterating thread writes it; the sender's thread reads `done` before `started`."""

    __slots__ = ("done", "failed", "released", "seconds", "started", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.started = self.done = self.failed = self.released = 0
        self.seconds = 0.0


def _walk(iterable: Iterable[T], progress: _Progress, place: tuple[str, str]) -> Iterator[T]:
    sender = current_sender()  # of the process that starts the loop
    if sender is None:
        yield from iterable
        return
    pid, clock = os.getpid(), time.perf_counter
    tally = _loop_counts(sender, place)
    tally.add(progress)
    try:
        for item in iterable:
            progress.started += 1
            began = clock()
            yield item
            progress.seconds += clock() - began
            progress.done += 1
        progress.total = progress.started
    except GeneratorExit:  # the loop was left
        progress.released = max(progress.total, progress.started) - progress.done
        raise
    except BaseException:  # the iterable raised
        progress.failed = 1
        progress.released = max(progress.total - progress.started - 1, 0)
        raise
    finally:
        if pid == os.getpid():
            tally.remove(progress)


class _LoopCounts:
    """All loops of this process with one prefix and group."""

    def __init__(self, sender: Sender, place: tuple[str, str]) -> None:
        self._sender, self._place = sender, place
        # The sender's own lock: the garbage collector may end a loop during a report, and two locks could deadlock.
        self._lock = sender.lock
        self._live: list[_Progress] = []
        self._ended = _Progress(0)
        self._last_reported: Counts | None = None

    def add(self, progress: _Progress) -> None:
        with self._lock:
            self._live.append(progress)
        self._sender.add_source(self.report)

    def remove(self, progress: _Progress) -> None:
        """Add a loop that has ended to the sums."""
        ended = self._ended
        with self._lock:
            self._live.remove(progress)
            ended.done += progress.done
            ended.failed += progress.failed
            ended.released += progress.released
            ended.seconds += progress.seconds
        if self._sender.spool is not None:  # before this process is terminated
            self.report()

    def report(self) -> bool:
        """Report the counts if they changed. Returns False once all loops have ended and were reported.

        Holds the lock: of two readings, the older must not be reported last.
        """
        with self._lock:
            ended = self._ended
            done, failed, released, seconds = ended.done, ended.failed, ended.released, ended.seconds
            running = waiting = 0
            for one in list(self._live):
                finished, started = one.done, one.started
                done += finished
                running += started - finished
                waiting += max(one.total - started, 0)
                seconds += one.seconds
            states = {
                "memory": done, "erred": failed, "released": released, "processing": running, "waiting": waiting,
            }  # fmt: skip
            counts = (self._sender.attempt_changes, states, done, seconds)
            if counts == self._last_reported:
                return bool(self._live)
            if self._sender.count(*self._place, states, done, seconds):
                self._last_reported = counts
            return True


_all_loop_counts: dict[tuple[str, tuple[str, str]], _LoopCounts] = {}
"""By reporter and (prefix, group): a forked child finds none of its parent's."""


def _loop_counts(sender: Sender, place: tuple[str, str]) -> _LoopCounts:
    with sender.lock:
        return _all_loop_counts.setdefault((sender.reporter, place), _LoopCounts(sender, place))
