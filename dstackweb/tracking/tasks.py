"""`task`: report one task when it starts and when it ends."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from dstackweb.tracking.current import current_sender
from dstackweb.tracking.entries import plain_text
from dstackweb.tracking.sender import Sender

F = TypeVar("F", bound=Callable[..., Any])

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
