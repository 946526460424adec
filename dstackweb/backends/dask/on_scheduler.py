"""What runs in a Dask scheduler: it places instances' tasks, and remembers what became of them. Sent by its text.

All of it runs on the scheduler's event loop, so two orders never see the same free worker. The scheduler needs nothing
of dstackweb, and forgets all of this when it restarts.
"""

from __future__ import annotations

import inspect
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

if TYPE_CHECKING:
    from dstackweb.backends.dask.fit import claims, fits

NAME = CLIENT = TOPIC = "dstackweb"
RUN = "exec(source, space) or space['run'](source, **order)"
KEPT, KEPT_S = 10_000, 86400.0
"""How many ended instances are remembered, and for how long at least while there are fewer."""
SETTLE_S = 5.0
"""A released task that had not begun may still begin: its worker hears of the release within this."""
LEAVE_S = 5.0
"""What a guard may take beyond its grace once its worker is dead."""


def install(dask_scheduler: Any, op: str, on_worker: str) -> str:
    """Answer messages of `op`. A newer version takes over the rows of an older one, and both go on answering."""
    old = dask_scheduler.plugins.get(NAME)
    plugin = Instances(dask_scheduler, on_worker, old.rows if old else {})
    if old:
        dask_scheduler.remove_plugin(NAME)
    dask_scheduler.add_plugin(plugin, name=NAME)
    dask_scheduler.handlers[op] = plugin.answer
    return ""


class Instances(SchedulerPlugin):
    """A row for each instance, by its key. `places` are the workers where its processes may be.

    A place is None while its worker is there; once that is lost, the time when the guard has ended all processes.
    """

    def __init__(self, scheduler: Any, on_worker: str, rows: dict[str, dict[str, Any]]) -> None:
        self.scheduler, self.on_worker, self.rows = scheduler, on_worker, rows

    async def answer(self, ask: str, data: dict[str, Any]) -> dict[str, Any]:
        """Handle one message."""
        try:
            asked: dict[str, Any] = {
                "about": self.about, "workers": self.workers, "launch": self.launch, "instances": self.instances,
                "terminate": self.terminate,
            }  # fmt: skip
            found = asked[ask](**data)
            return {"answer": await found if inspect.isawaitable(found) else found}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:300], "distributed": version("distributed")}

    def about(self) -> dict[str, Any]:
        """Versions: the scheduler's, and those of workers that have another one."""
        own = version("distributed")
        of_workers = {
            address: str((worker.versions.get("packages") or {}).get("distributed"))
            for address, worker in self.scheduler.workers.items()
        }
        other = {address: found for address, found in of_workers.items() if found != own}
        return {"distributed": own, "workers": len(of_workers), "other": other}

    def workers(self) -> list[dict[str, Any]]:
        """All workers with what they have, and what is used."""
        return [self._worker(worker) for worker in self.scheduler.workers.values()]

    def _worker(self, worker: Any) -> dict[str, Any]:
        ours = [row for row in self.rows.values() if worker.address in self._held(row)]
        keys = {row["key"] for row in ours}
        others = sum(task.key not in keys for task in worker.processing)
        return {
            "name": str(worker.name),
            "threads": worker.nthreads,
            "tasks": others + len(ours),
            "cpus_used": others + sum(max(row["cpus"], 1) for row in ours),
            "memory_mib": int(worker.memory_limit or 0) // 2**20,
            "memory_used_mib": sum(row["memory_mib"] for row in ours),
            "resources": {name: float(amount) for name, amount in worker.resources.items()},
            "resources_used": {name: float(amount) for name, amount in worker.used_resources.items()},
            "running": worker.status.name == "running",
        }

    @staticmethod
    def _held(row: dict[str, Any]) -> set[str]:
        """Addresses of workers that the instance uses."""
        return {*row["places"], *(() if row["over"] else (row["worker"],))}

    async def launch(
        self, key: str, instance: str, deployment: str, cpus: int, memory_mib: int, gpu: str, gpu_count: int,
        script: str, grace_s: float, limit_s: float | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Place a task on the fullest worker that has room; the same key again finds the first one."""
        if key in self.rows:
            return self._shown(self.rows[key])
        self._trim()
        size = (cpus, memory_mib, gpu, gpu_count)
        room = [(fits(self._worker(worker), *size), worker) for worker in self.scheduler.workers.values()]
        if not (free := [(count, worker) for count, worker in room if count]):
            full = any(fits(self._worker(worker), *size, empty=True) for _count, worker in room)
            return {"refused": f"no room on {len(room)} workers", "full": full}
        worker = min(free, key=lambda one: one[0])[1]
        row = {
            "key": key, "instance": instance, "deployment": deployment, "cpus": cpus, "memory_mib": memory_mib,
            "worker": worker.address, "host": worker.host, "at": time.time(), "grace_s": grace_s, "begun": False,
            "over": 0.0, "sure": False, "places": {}, "why": "", "text": "",
        }  # fmt: skip
        self.rows[key] = row
        order = {
            "key": key, "gpu": gpu, "gpu_count": gpu_count, "script": script, "grace_s": grace_s, "limit_s": limit_s,
        }  # fmt: skip
        try:
            await self._submit(row, order, claims(self._worker(worker), *size))
        finally:
            if key not in self.scheduler.tasks and not row["over"]:
                del self.rows[key]
        return self._shown(row)

    async def _submit(self, row: dict[str, Any], order: dict[str, Any], resources: dict[str, float]) -> None:
        from dask._expr import LLGExpr
        from dask._task_spec import Task
        from distributed.protocol.serialize import Serialized, serialize, to_serialize

        key = row["key"]
        space = {"source": self.on_worker, "order": order, "space": {"__name__": NAME}}
        expr = LLGExpr({key: Task(key, eval, RUN, space)})
        await self.scheduler.update_graph(
            client=CLIENT,
            expr_ser=Serialized(*serialize(to_serialize(expr), on_error="raise")),
            keys={key},
            span_metadata={"collections": []},
            internal_priority={key: 0},
            submitting_task=None,
            annotations={"workers": [row["worker"]], **({"resources": resources} if resources else {})},
        )
        if key not in self.scheduler.tasks:
            raise RuntimeError("the scheduler did not take the task; its log says why")

    def instances(self, deployment: str) -> list[dict[str, Any]]:
        """All rows of a deployment."""
        return [self._shown(row) for row in self.rows.values() if row["deployment"] == deployment]

    def terminate(self, keys: list[str]) -> None:
        """Release tasks: their functions notice, and end the scripts."""
        for key in keys:
            if (row := self.rows.get(key)) and not row["over"]:
                self._end(row, "cloud", "", release=False)
                self._release(key, everyone=True)

    def _release(self, key: str, *, everyone: bool = False) -> None:
        """Take the task's holder away, so that the scheduler forgets it."""
        task = self.scheduler.tasks.get(key)
        for client in list(task.who_wants or ()) if task else ():
            if everyone or client.client_key == CLIENT:
                self.scheduler.client_releases_keys([key], client=client.client_key)

    def _end(self, row: dict[str, Any], why: str, text: str, *, sure: bool = False, release: bool = True) -> None:
        """Note that the scheduler is done with a task; `sure` when its function has returned."""
        if not row["over"]:
            row.update(over=time.monotonic(), why=why, text=row["text"] or text, sure=sure)
        if release:  # after the transition that this is called in
            self.scheduler.loop.add_callback(self._release, row["key"], everyone=why == "interrupted")

    def _shown(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            **{name: row[name] for name in ("key", "instance", "host", "at", "why", "text")},
            "state": self._state(row, time.monotonic()),
        }

    @staticmethod
    def _state(row: dict[str, Any], now: float) -> str:
        if not row["over"]:
            return "running" if row["begun"] else "starting"
        for place, until in list(row["places"].items()):
            if until is not None and now > until:
                del row["places"][place]
        settled = row["begun"] or row["sure"] or now > row["over"] + SETTLE_S
        return "gone" if settled and not row["places"] else "ending"

    def _trim(self) -> None:
        now = time.monotonic()
        gone = [row for row in self.rows.values() if self._state(row, now) == "gone"]
        for row in gone[:-KEPT] + [row for row in gone[-KEPT:] if now > row["over"] + KEPT_S]:
            del self.rows[row["key"]]

    # Called by the scheduler, as of each of its plugins.

    def transition(self, key: Any, start: str, finish: str, *args: Any, **more: Any) -> None:
        """Follow the tasks of instances."""
        row = self.rows.get(key) if isinstance(key, str) else None
        if row is None:
            return
        match finish:
            case "memory":
                row["places"].pop(row["worker"], None)
                self._end(row, "cloud", "", sure=True)
            case "erred":
                text = self.scheduler.tasks[key].exception_text or ""
                self._end(row, "interrupted" if "KilledWorker" in text else "cloud", text)
            case "no-worker":
                self._end(row, "interrupted", "its worker left the cluster")
            case "forgotten":
                self._end(row, "cloud", "cancelled in Dask", release=False)

    def remove_worker(self, scheduler: Any, worker: str, **more: Any) -> None:
        """A lost worker's tasks are not for another one. Its guards end what is left, without a word."""
        for row in self.rows.values():
            if worker in row["places"]:
                row["places"][worker] = time.monotonic() + row["grace_s"] + LEAVE_S
            if row["worker"] == worker and not row["over"]:
                self._end(row, "interrupted", "its worker left the cluster")

    def log_event(self, topic: str, msg: Any) -> None:
        """What tasks say of their processes."""
        row = self.rows.get(msg.get("key", "")) if topic == TOPIC and isinstance(msg, dict) else None
        if row is not None and msg["what"] == "begun":
            row["begun"] = True
            row["places"][msg["worker"]] = None
        elif row is not None:
            row["places"].pop(msg["worker"], None)
            row["text"] = row["text"] or msg["text"]
