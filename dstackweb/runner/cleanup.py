"""Removes what ended jobs left on a joined host: runners' files, and later runs' directories, as the server allows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.jobs import LocalJobs, old_runs, remove_runs
from dstackweb.runner.state import say

EVERY_S, SOON_S = 600.0, 2.0
BUDGET_S = 5.0
"""How long one round may take; the next one is soon if something remains."""
AT_ONCE = 500


class Cleanup:
    """Cleans in a thread of its own: a slow disk delays no job."""

    def __init__(self, jobs: LocalJobs) -> None:
        self._jobs = jobs
        self._thread = ThreadPoolExecutor(1)
        self._due = 0.0
        self._pruned = self._waiting = {"jobs": 0, "runs": 0}

    def start(self, ages: dict[str, Any], connect: Callable[[], Client], runs_dir: str) -> None:
        """Begin a round if one is due. `ages`: how old files must be, in seconds (`jobs_s`, `runs_s`)."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + EVERY_S
            self._thread.submit(self._round, float(ages["jobs_s"]), float(ages["runs_s"]), connect(), runs_dir)

    def _round(self, jobs_s: float, runs_s: float, client: Client, runs_dir: str) -> None:
        until = time.monotonic() + BUDGET_S
        jobs, runs = self._jobs.old(jobs_s), old_runs(runs_dir, runs_s)
        try:
            for start in range(0, max(len(jobs), len(runs), 1), AT_ONCE):
                part = slice(start, start + AT_ONCE)
                self._remove(client, jobs[part], runs[part], runs_dir, until, is_first=start == 0)
                if time.monotonic() >= until:
                    self._due = time.monotonic() + SOON_S
                    return
        except (Unreachable, Refused, OSError, ValueError, KeyError) as error:
            say(f"can't remove old files: {error}")
        finally:
            client.close()

    def _remove(
        self, client: Client, jobs: list[str], runs: list[str], runs_dir: str, until: float, *, is_first: bool
    ) -> None:
        """Ask which of these may go, and remove them. What was removed is reported with the next call."""
        # Runs that were removed lately are asked for once, with the first part.
        asked = {"jobs": jobs, "runs": runs, "removed": is_first}
        may_go = client.post("files", {**asked, "pruned": self._pruned, "waiting": self._waiting})
        there = [run for run in may_go["runs"] if os.path.isdir(os.path.join(runs_dir, str(UUID(run))))]
        self._pruned = {"jobs": 0, "runs": 0}
        self._pruned = {"jobs": self._jobs.forget(may_go["jobs"]), "runs": remove_runs(runs_dir, there, until)}
        left = {"jobs": len(may_go["jobs"]), "runs": len(there)}
        self._waiting = {kind: left[kind] - self._pruned[kind] for kind in left}
