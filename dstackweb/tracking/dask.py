"""A `distributed` cluster's tasks on a progress page: `watch(client)`, or `--preload dstackweb.tracking.dask`.

The scheduler's own counts are told, group by group, by its own names. Nothing of this waits on the scheduler's loop:
a transition marks its group, a short tick reads what is marked, and `sender`'s thread speaks HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import cloudpickle
from distributed import Client, Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

import dstackweb.tracking
from dstackweb.tracking.current import TOKEN, URL
from dstackweb.tracking.entries import KEY_MAX, MESSAGE_MAX, fitting
from dstackweb.tracking.ledger import Ledger
from dstackweb.tracking.sender import EXIT_S, Sender

log = logging.getLogger("dstackweb.tracking")

TICK_S = 0.5
TICK_MAX_S = 5.0
SHARE = 0.005
"""Of a busy scheduler's loop, for reading what is marked: a longer tick is followed by a longer pause. Sending it takes
the sender's thread about as much again, and marking it the loop."""
GROUPS_A_TICK = 500
"""Marked groups that one tick reads: some milliseconds. The others wait for the next."""
LOOKED_OVER_A_TICK = 500
BACKLOG_MAX = 10_000
"""While so many groups wait to be sent, no more are read: they stay marked, and are told as they are then."""
FAILURES_MAX = 1_000
"""Messages of a tick; those of tasks that failed only because of another take half of them at most."""


def watch(client: Client, *, url: str | None = None, token: str | None = None) -> Any:
    """Show the tasks of `client`'s cluster on the page of this run, from now until the cluster or the run ends.

    `url` and `token` default to DSTACKWEB_TASKS_URL and DSTACKWEB_TASKS_TOKEN, which every job of dstackweb has;
    without them nothing happens. Watching twice is watching once. The scheduler needs no dstackweb installed, but it
    must reach `url`. With an asynchronous client the result is to be awaited. Raises ValueError when `url` is no URL.
    """
    plugin = _from_environment(url, token)
    if plugin is None:
        return _nothing() if client.asynchronous else None
    return client.register_plugin(_Portable(plugin), name=plugin.name)


async def dask_setup(scheduler: Any) -> None:
    """What `dask scheduler --preload dstackweb.tracking.dask` calls; workers and clients are left alone."""
    if isinstance(scheduler, Scheduler) and (plugin := _from_environment(None, None)):
        await scheduler.register_scheduler_plugin(plugin, name=plugin.name, idempotent=True)


def _from_environment(url: str | None, token: str | None) -> GroupCounts | None:
    url = url or os.environ.get(URL)
    token = token or os.environ.get(TOKEN)
    if not url or not token:
        log.debug("%s and %s are not set: this cluster's tasks are not reported", URL, TOKEN)
        return None
    return GroupCounts(url, token)


async def _nothing() -> None:
    pass


class GroupCounts(SchedulerPlugin):
    """Tells a scheduler's task groups to one URL. Raises ValueError when that is none of http or https."""

    idempotent = True

    def __init__(self, url: str, token: str) -> None:
        self.to = (url, token)
        self.name = f"dstackweb-{hashlib.sha256(f'{url} {token}'.encode()).hexdigest()[:12]}"
        self._sender = Sender(url, token)
        self._ledger = Ledger()
        self._dirty = self._ledger.dirty
        self._failures: list[tuple[str, str, str, str]] = []
        self._looking: Iterator[Any] = iter(())
        self._ticking: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.to

    async def start(self, scheduler: Any) -> None:
        """Tell the groups that are there, and go on with what moves."""
        if self._ticking is None:  # a scheduler starts what it was given before it ran itself
            self._scheduler = scheduler
            self._tasks = scheduler.tasks
            self._ledger.attach(scheduler.task_groups.values())
            self._ticking = asyncio.create_task(self._tick())

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Mark the task's group: this runs thousands of times a second, on the scheduler's loop."""
        task = self._tasks[key]
        group, dirty = task.group, self._dirty
        if start == "processing" and finish == "memory":
            dirty[group] = dirty.get(group, 0) + 1
        elif group not in dirty:
            dirty[group] = 0
        if finish == "erred":
            self._failed(task)

    async def close(self) -> None:
        """Tell the last counts, and that nothing follows: within some seconds, or not at all."""
        if self._ticking is not None:
            self._ticking.cancel()
            self._tell(None)
            await self._end()

    async def _tick(self) -> None:
        moved = 0
        try:
            while not self._sender.over and self._scheduler.plugins.get(self.name) is self:
                began = time.thread_time()
                self._look_over()
                if self._sender.backlog < BACKLOG_MAX:
                    self._tell(GROUPS_A_TICK)
                pause_s = min(max(TICK_S, (time.thread_time() - began) / SHARE), TICK_MAX_S)
                before, moved = moved, self._scheduler.transition_counter
                await asyncio.sleep(TICK_S if moved == before else pause_s)  # a scheduler at rest has time
            self._tell(None)  # it was unregistered, of which a plugin is told nothing
        except Exception:  # a bug here must not reach the cluster
            log.warning("reporting the cluster's tasks ended by an error", exc_info=True)
        if self._scheduler.plugins.get(self.name) is self:
            self._scheduler.remove_plugin(self.name)
        await self._end()

    async def _end(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._sender.close, EXIT_S)

    def _look_over(self) -> None:
        """Find what no transition tells of, such as scattered data: a few groups with each tick, then the next."""
        some = list(islice(self._looking, LOOKED_OVER_A_TICK))
        if len(some) < LOOKED_OVER_A_TICK:
            self._looking = iter(list(self._scheduler.task_groups.values()))
        self._ledger.look_over(some)

    def _tell(self, limit: int | None) -> None:
        for told in self._ledger.collect(limit):
            self._sender.count(*told)
        failures, self._failures = self._failures, []
        for failure in failures:
            self._sender.failure(*failure)

    def _failed(self, task: Any) -> None:
        cause = task.exception_blame
        if len(self._failures) >= (FAILURES_MAX if cause is task else FAILURES_MAX // 2):
            return
        message = cause.exception_text or "" if cause else ""
        if cause is not task:
            message = f"It needs {cause.key}, which failed: {message}" if cause else "It needs a task that failed."
        elif cause.traceback_text:
            message = f"{message}\n{cause.traceback_text}"
        prefix, group = self._ledger.name_of(task.group)
        self._failures.append((fitting(task.key, KEY_MAX), prefix, group, message[:MESSAGE_MAX]))


class _Portable(SchedulerPlugin):
    """A plugin that is pickled with its code, so that a scheduler without dstackweb can run it."""

    def __init__(self, plugin: GroupCounts) -> None:
        self._plugin = plugin
        self.idempotent = plugin.idempotent

    def __reduce__(self) -> tuple[Any, ...]:
        cloudpickle.register_pickle_by_value(dstackweb.tracking)
        try:
            return cloudpickle.loads, (cloudpickle.dumps(_Packed(self._plugin)),)
        finally:
            cloudpickle.unregister_pickle_by_value(dstackweb.tracking)


class _Packed:
    """A plugin and its code, which is looked at only where it is needed."""

    def __init__(self, plugin: GroupCounts) -> None:
        self._plugin = plugin

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (cloudpickle.dumps(self._plugin), *self._plugin.to)


def _unpacked(code: bytes, url: str, token: str) -> Any:
    """The plugin, by the module where that is loaded: in the process that packed it, the code would overwrite it."""
    module = sys.modules.get("dstackweb.tracking.dask")
    return cloudpickle.loads(code) if module is None else module.GroupCounts(url, token)
