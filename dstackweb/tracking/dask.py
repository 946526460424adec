"""Report the tasks of a `distributed` cluster: `watch(client)`, or `--preload dstackweb.tracking.dask`.

The scheduler's own counts are reported per group, under its own names. Nothing blocks the scheduler's event loop: a
transition marks its group, a short tick reads marked groups, and the sender's thread sends them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import cloudpickle
from distributed import Client, Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import TaskGroup

import dstackweb.tracking
from dstackweb.tracking.client import KEY_MAX, MESSAGE_MAX, shorten_name
from dstackweb.tracking.current import TOKEN, URL
from dstackweb.tracking.sender import EXIT_S, Sender

log = logging.getLogger("dstackweb.tracking")

TICK_S = 0.5
TICK_MAX_S = 5.0
LOOP_SHARE = 0.005
"""Share of a busy scheduler's loop spent on reading marked groups: a longer tick is followed by a longer pause. Sending
costs the sender's thread about the same again, and marking costs the loop the same."""
GROUPS_PER_TICK = 500
"""Marked groups read by one tick, which takes some milliseconds. The others wait for the next one."""
CHECKED_PER_TICK = 500
BACKLOG_MAX = 10_000
"""While so many groups wait to be sent, no more are read. They stay marked and are reported later."""
FAILURES_MAX = 1_000
"""Messages per tick. Tasks that failed because of another task take at most half of them."""

GROUPS_MAX = 100_000
"""Groups that are reported individually. Later ones are counted together, in one group of their prefix."""
PREFIXES_MAX = 10_000
"""Prefixes that are reported individually, as many as the server counts (progress.counters). Later ones are counted
together, in the prefix OTHERS."""
OTHERS = "…"

STATES = {
    "memory": "memory", "erred": "erred", "released": "released", "processing": "processing", "queued": "queued",
    "no-worker": "no_worker", "waiting": "waiting", "forgotten": "forgotten",
}  # fmt: skip
"""Dask's states and the server's names for them. An unknown state counts as waiting, which keeps totals right."""

HOW = {"memory": "done", "erred": "failed"}
"""How a task ends in these states. Tasks that are released or forgotten afterwards are counted apart."""
ENDING = frozenset((*HOW, "released"))
"""States of tasks that may have ended."""

GroupName = tuple[str, str]
"""Prefix and group, as reported."""
CountArgs = tuple[str, str, dict[str, int], int, float]
"""Arguments of `Sender.count`: prefix, group, states, number of timed tasks, their total seconds."""


def watch(client: Client, *, url: str | None = None, token: str | None = None) -> Any:
    """Show the tasks of `client`'s cluster on the page of this run, from now until the cluster or the run ends.

    `url` and `token` default to DSTACKWEB_TASKS_URL and DSTACKWEB_TASKS_TOKEN, which every job has; without them
    nothing is reported. A second call changes nothing. The scheduler does not need dstackweb, but must reach `url`.
    Await the result with an asynchronous client. Raises ValueError when `url` is not an http or https URL.
    """
    plugin = _from_environment(url, token)
    if plugin is None:
        return _do_nothing() if client.asynchronous else None
    return client.register_plugin(_PortablePlugin(plugin), name=plugin.name)


async def dask_setup(scheduler: Any) -> None:
    """Called by `dask scheduler --preload dstackweb.tracking.dask`. Does nothing on workers and clients."""
    if isinstance(scheduler, Scheduler) and (plugin := _from_environment(None, None)):
        await scheduler.register_scheduler_plugin(plugin, name=plugin.name, idempotent=True)


def _from_environment(url: str | None, token: str | None) -> ReportingPlugin | None:
    url = url or os.environ.get(URL)
    token = token or os.environ.get(TOKEN)
    if not url or not token:
        log.debug("%s and %s are not set: this cluster's tasks are not reported", URL, TOKEN)
        return None
    return ReportingPlugin(url, token)


async def _do_nothing() -> None:
    pass


class ReportingPlugin(SchedulerPlugin):
    """Reports a scheduler's task groups to one URL. Raises ValueError when it is not an http or https URL."""

    idempotent = True

    def __init__(self, url: str, token: str) -> None:
        self.to = (url, token)
        self.name = f"dstackweb-{hashlib.sha256(f'{url} {token}'.encode()).hexdigest()[:12]}"
        self._sender = Sender(url, token)
        self._counter = GroupCounter()
        self._dirty = self._counter.dirty
        self._failures: list[tuple[str, str, str, str]] = []
        self._unchecked: Iterator[Any] = iter(())
        self._ticking: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.to

    async def start(self, scheduler: Any) -> None:
        """Report the existing groups, then the changes."""
        if self._ticking is None:  # a scheduler starts plugins again that it was given before it ran
            self._scheduler = scheduler
            self._tasks = scheduler.tasks
            self._counter.attach(scheduler.task_groups.values())
            self._ticking = asyncio.create_task(self._tick())

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Mark the task's group: this runs thousands of times a second, on the scheduler's loop."""
        task = self._tasks[key]
        group, dirty = task.group, self._dirty
        if start == "processing" and finish == "memory":
            dirty[group] = dirty.get(group, 0) + 1
        elif group not in dirty:
            dirty[group] = 0
        if start in ENDING:
            self._counter.note_end(key, group, start, finish)
        if finish == "erred":
            self._add_failure(task)

    async def close(self) -> None:
        """Report the last counts and the end of this reporter, within EXIT_S seconds."""
        if self._ticking is not None:
            self._ticking.cancel()
            self._report(None)
            await self._end()

    async def _tick(self) -> None:
        moved = changes = 0
        try:
            while not self._sender.stopped and self._scheduler.plugins.get(self.name) is self:
                began = time.thread_time()
                if changes != self._sender.attempt_changes:
                    changes = self._sender.attempt_changes
                    self._counter.repeat_all()
                self._mark_changed()
                if self._sender.backlog < BACKLOG_MAX:
                    self._report(GROUPS_PER_TICK)
                pause_s = min(max(TICK_S, (time.thread_time() - began) / LOOP_SHARE), TICK_MAX_S)
                before, moved = moved, self._scheduler.transition_counter
                await asyncio.sleep(TICK_S if moved == before else pause_s)  # an idle scheduler has time
            self._report(None)  # it was unregistered, and plugins get no notice of that
        except Exception:  # a bug here must not reach the cluster
            log.warning("reporting the cluster's tasks stopped after an error", exc_info=True)
        if self._scheduler.plugins.get(self.name) is self:
            self._scheduler.remove_plugin(self.name)
        await self._end()

    async def _end(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._sender.close, EXIT_S)

    def _mark_changed(self) -> None:
        """Find changes without a transition, such as scattered data: check a few groups at each tick, in turn."""
        some = list(islice(self._unchecked, CHECKED_PER_TICK))
        if len(some) < CHECKED_PER_TICK:
            self._unchecked = iter(list(self._scheduler.task_groups.values()))
        self._counter.mark_changed(some)

    def _report(self, limit: int | None) -> None:
        for counts in self._counter.collect(limit):
            self._sender.count(*counts)
        failures, self._failures = self._failures, []
        for failure in failures:
            self._sender.failure(*failure)

    def _add_failure(self, task: Any) -> None:
        cause = task.exception_blame
        if len(self._failures) >= (FAILURES_MAX if cause is task else FAILURES_MAX // 2):
            return
        message = cause.exception_text or "" if cause else ""
        if cause is not task:
            message = f"Its dependency {cause.key} failed: {message}" if cause else "A dependency failed."
        elif cause.traceback_text:
            message = f"{message}\n{cause.traceback_text}"
        prefix, group = self._counter.reported_name(task.group)
        self._failures.append((shorten_name(task.key, KEY_MAX), prefix, group, message[:MESSAGE_MAX]))


class _PortablePlugin(SchedulerPlugin):
    """Pickles a plugin with its code, so that a scheduler without dstackweb can run it."""

    def __init__(self, plugin: ReportingPlugin) -> None:
        self._plugin = plugin
        self.idempotent = plugin.idempotent

    def __reduce__(self) -> tuple[Any, ...]:
        cloudpickle.register_pickle_by_value(dstackweb.tracking)
        try:
            return cloudpickle.loads, (cloudpickle.dumps(_PickledPlugin(self._plugin)),)
        finally:
            cloudpickle.unregister_pickle_by_value(dstackweb.tracking)


class _PickledPlugin:
    """A pickled plugin with its code, which is loaded only where the module is missing."""

    def __init__(self, plugin: ReportingPlugin) -> None:
        self._plugin = plugin

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_plugin, (cloudpickle.dumps(self._plugin), *self._plugin.to)


def _unpickle_plugin(code: bytes, url: str, token: str) -> Any:
    """The plugin. Uses the module where it is loaded: unpickling the code would overwrite it there."""
    module = sys.modules.get("dstackweb.tracking.dask")
    return cloudpickle.loads(code) if module is None else module.ReportingPlugin(url, token)


@dataclass(slots=True)
class Contribution:
    """What a live group object has added to the totals of its name so far.

    `ended`: released and forgotten tasks that were done or failed before, by the server's names for that.
    """

    name: GroupName
    states: dict[str, int]
    seconds: float
    ended: dict[str, int]


@dataclass(slots=True)
class Totals:
    """Totals of one name over all its group objects, including dropped ones."""

    states: dict[str, int]
    timed: int = 0
    seconds: float = 0.0

    def add(self, state: str, n: int) -> None:
        self.states[state] = self.states.get(state, 0) + n

    def nonzero(self) -> dict[str, int]:
        return {state: n for state, n in self.states.items() if n}


class GroupCounter:
    """Turns changed groups into absolute counts per name, which keep what Dask has dropped.

    A `TaskGroup` lives until all its tasks are forgotten; a later group of the same name is another object.

    Not thread-safe: use it on the scheduler's event loop only.
    """

    def __init__(self, groups_max: int = GROUPS_MAX, prefixes_max: int = PREFIXES_MAX) -> None:
        self.dirty: dict[TaskGroup, int] = {}
        """Changed groups, longest waiting first, with the number of tasks timed since."""
        self._ended: dict[TaskGroup, dict[str, int]] = {}
        self._how: dict[Any, str] = {}
        """How released tasks had ended, by key."""
        self._contributions: dict[TaskGroup, Contribution] = {}
        self._totals: dict[GroupName, Totals] = {}
        self._to_repeat: dict[GroupName, None] = {}
        self._prefixes: set[str] = set()
        self._groups_max = groups_max
        self._prefixes_max = prefixes_max

    def attach(self, groups: Iterable[TaskGroup]) -> None:
        """Start with existing groups. Their number of timed tasks is unknown, so only later durations count."""
        for group in groups:
            self._add_contribution(group, _seconds(group))
            self.dirty.setdefault(group, 0)

    def note_end(self, key: Any, group: TaskGroup, start: str, finish: str) -> None:
        """Note how a task had ended that leaves a state of ENDING. Call at each such transition."""
        how = self._how.pop(key, None) if start == "released" else HOW.get(start)
        if how is None:
            return
        ended = self._ended.setdefault(group, {})
        if start == "released":
            ended[f"released_{how}"] = ended.get(f"released_{how}", 0) - 1
        if finish == "released":
            self._how[key] = how
        if finish in ("released", "forgotten"):
            name = f"{finish}_{how}"
            ended[name] = ended.get(name, 0) + 1

    def mark_changed(self, groups: Iterable[TaskGroup]) -> None:
        """Mark groups that changed without a transition, such as scattered data. Some may have been dropped since."""
        for group in groups:
            contribution = self._contributions.get(group)
            if group not in self.dirty and (
                contribution.states != group.states if contribution else _has_live(group.states)
            ):
                self.dirty[group] = 0

    def repeat_all(self) -> None:
        """Collect all counts again, for the next attempt of the run."""
        self._to_repeat = dict.fromkeys(self._totals)

    def collect(self, limit: int | None = None) -> list[CountArgs]:
        """Counts of at most `limit` dirty groups (None: all), which become clean, and of those to be repeated."""
        changed: dict[GroupName, Totals] = {}
        for group in list(islice(self.dirty, limit)):
            timed = self.dirty.pop(group)
            contribution = self._contributions.get(group) or self._add_contribution(group, 0.0)
            changed[contribution.name] = self._add_changes(group, contribution, timed)
        for name in list(islice(self._to_repeat, limit)):
            del self._to_repeat[name]
            changed.setdefault(name, self._totals[name])
        return [(*name, total.nonzero(), total.timed, total.seconds) for name, total in changed.items()]

    def reported_name(self, group: TaskGroup) -> GroupName:
        contribution = self._contributions.get(group)
        return contribution.name if contribution else self._name(group)

    def _add_contribution(self, group: TaskGroup, seconds: float) -> Contribution:
        name = self._name(group)
        self._prefixes.add(name[0])
        self._totals.setdefault(name, Totals({}))
        self._contributions[group] = contribution = Contribution(name, {}, seconds, {})
        return contribution

    def _add_changes(self, group: TaskGroup, contribution: Contribution, timed: int) -> Totals:
        total = self._totals[contribution.name]
        now: dict[Any, int] = dict(group.states)
        was = contribution.states
        for state, n in now.items():
            if n != (before := was.get(state, 0)):
                total.add(STATES.get(state, "waiting"), n - before)
        ended = self._ended.get(group)
        if ended is not None:
            for state, n in ended.items():
                if more := n - contribution.ended.get(state, 0):
                    total.add(state, more)
                    total.add(state.partition("_")[0], -more)  # where it is counted otherwise
            contribution.ended = dict(ended)
        if timed:
            seconds = _seconds(group)
            total.timed += timed
            total.seconds += max(0.0, seconds - contribution.seconds)
            contribution.seconds = seconds
        if _has_live(now):
            contribution.states = now
        else:  # the scheduler drops this object: it changes no more
            del self._contributions[group]
            self._ended.pop(group, None)
        return total

    def _name(self, group: TaskGroup) -> GroupName:
        prefix, name = shorten_name(group.prefix.name), shorten_name(group.name)
        if prefix not in self._prefixes and len(self._prefixes) >= self._prefixes_max:
            return OTHERS, OTHERS
        if (prefix, name) not in self._totals and len(self._totals) >= self._groups_max:
            return prefix, OTHERS
        return prefix, name


def _has_live(states: Mapping[Any, int]) -> bool:
    return any(n for state, n in states.items() if state != "forgotten")


def _seconds(group: TaskGroup) -> float:
    return group.all_durations.get("compute", 0.0)
