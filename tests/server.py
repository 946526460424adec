"""A whole deployment as real processes: the supervisor with web, workers, ticker and host, in a home of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psycopg
import pytest

from tests.support import REPO, deployment_env, eventually

TOKEN = "dw_test-token-of-the-first-admin"
SCRAPE_TOKEN = "of-the-tests-scraper"
PASSWORD = "correct horse battery"


def kill(*pids: int) -> None:
    """SIGKILL to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Server:
    """`with Server(home) as server: server.api("GET", "runs")`. `env` overrides settings, such as time-outs.

    `home` must be a folder that other users can reach, since jobs run as another user when the tests are root. Without
    `migrated` its first start makes the tables. `tree` is the checkout that it runs.
    """

    def __init__(self, home: Path, *, migrated: bool = True, tree: Path = REPO, **env: str) -> None:
        self.home, self.tree = home, tree
        self.env = deployment_env(
            home,
            migrated=migrated,
            **{
                "DSTACKWEB_HOST_NAME": "box",
                "DSTACKWEB_ADMIN_TOKEN": TOKEN,
                "DSTACKWEB_ADMIN_PASSWORD": PASSWORD,
                "DSTACKWEB_METRICS_TOKEN": SCRAPE_TOKEN,
                "DSTACKWEB_SHARED_UID": "1",
                "DSTACKWEB_HEARTBEAT_S": "1",
                "DSTACKWEB_WATCH_EVERY_S": "0.5",
                **env,
            },
        )
        self.port = int(self.env["DSTACKWEB_PORT"])
        self.url = f"http://{self.env.get('DSTACKWEB_HOST', '127.0.0.1')}:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(
            base_url=f"{self.url}/api/v1", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30
        )

    def start(self) -> Server:
        """Start the supervisor and wait until the server answers and its host is there."""
        self.launch()
        eventually(self.is_ready, deadline=120)
        return self

    def launch(self) -> None:
        """Start the supervisor."""
        with (self.home / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dstackweb.manage", "up"], cwd=self.tree, env=self.env, stdout=log, stderr=log
            )

    def said(self) -> str:
        """What the supervisor has printed."""
        return (self.home / "up.log").read_text()

    def is_ready(self) -> bool:
        """Whether the server answers and a host is there."""
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(self.said())  # at once: an exception would count as not yet
        try:
            hosts = self.http.get("/hosts").json()["items"]
        except (httpx.HTTPError, KeyError, ValueError):
            return False
        return any(host["online"] for host in hosts)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the supervisor: cleanly, or with SIGKILL."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(90)
            self.process = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.http.close()

    def api(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """A call below /api/v1/projects/main that must succeed."""
        response = self.http.request(method, f"/projects/main/{path}", **kwargs)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response

    def submit(self, *commands: str, **keys: Any) -> str:
        """Submit a task of these shell commands; returns its name."""
        run = self.api("POST", "runs", json={"config": {"type": "task", "commands": list(commands), **keys}}).json()
        return str(run["name"])

    def run(self, name: str) -> dict[str, Any]:
        """The run as the API shows it."""
        found: dict[str, Any] = self.api("GET", f"runs/{name}").json()
        return found

    def log(self, name: str, **params: Any) -> bytes:
        """What has arrived of its log."""
        return self.api("GET", f"runs/{name}/logs", params=params).content

    def metrics(self) -> str:
        """What Prometheus would get."""
        return self.http.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {SCRAPE_TOKEN}"}).text

    def wait(self, name: str, *statuses: str, deadline: float = 60) -> dict[str, Any]:
        """Wait until the run is in one of these statuses (by default: has ended)."""
        wanted = statuses or ("done", "failed", "terminated")

        def there() -> dict[str, Any] | None:
            run = self.run(name)
            return run if run["status"] in wanted else None

        return eventually(there, deadline=deadline)

    def role_pids(self, needle: str) -> list[int]:
        """Processes of this deployment whose command line has `needle`, found by their environment."""
        home = f"DSTACKWEB_HOME={self.home}".encode()
        return [
            pid for pid, environ, command in _processes() if home in environ.split(b"\0") and needle.encode() in command
        ]

    def kill_workers(self) -> None:
        kill(*self.role_pids("qcluster"))

    def wait_done_once(self, names: Sequence[str], file: Path) -> None:
        """Wait for runs that each write their name to `file`."""
        for name in names:
            run = self.wait(name, deadline=120)
            assert run["status"] == "done", run
        assert sorted(file.read_text().split()) == sorted(names)

    def processes_of(self, run: dict[str, Any]) -> list[int]:
        """Living processes that carry the mark of one of the run's jobs."""
        marks = {f"DSTACKWEB_JOB={job['id']}".encode() for job in run["jobs"]}
        return [pid for pid, environ, _command in _processes() if marks & set(environ.split(b"\0"))]

    def runner_pid(self, run: dict[str, Any]) -> int:
        """The runner of the run's newest job, by the lock it holds."""
        return int((self.home / "jobs" / run["jobs"][0]["id"] / "lock").read_text())

    def file_of(self, run: dict[str, Any], name: str) -> str:
        """A file in the run's directory on node 0."""
        return (self.home / "runs" / run["id"] / "node-0" / name).read_text()

    def manage(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """A management command of this deployment."""
        return subprocess.run(
            [sys.executable, "manage.py", *argv], cwd=REPO, env=self.env, capture_output=True, text=True, check=False
        )

    def sql(self, statement: str) -> None:
        """A statement on this deployment's database, committed."""
        with self._database() as database:
            database.execute(statement)
            database.commit()

    def hurry_retry(self, name: str) -> None:
        """Once the run waits for its next attempt, let its back-off be over."""
        self.wait(name, "pending", deadline=120)
        self.hurry(name)

    def hurry(self, name: str) -> None:
        """Let the run's back-off be over, if it waits for its next attempt."""
        self.sql(f"UPDATE runs_run SET retry_at = '2026-01-01 00:00:00+00:00' WHERE name = '{name}'")

    @contextlib.contextmanager
    def locked_database(self) -> Iterator[None]:
        """Nobody can write meanwhile."""
        with self._database() as database:
            if isinstance(database, sqlite3.Connection):
                database.execute("BEGIN EXCLUSIVE")
            else:
                database.execute(
                    "LOCK TABLE runs_run, runs_job, runs_queuecount, scheduler_periodicjob IN EXCLUSIVE MODE"
                )
            yield
            database.rollback()

    @contextlib.contextmanager
    def _database(self) -> Iterator[Any]:
        if "DATABASE_URL" in self.env:
            database: Any = psycopg.connect(self.env["DATABASE_URL"])
        else:
            database = sqlite3.connect(self.home / "db.sqlite3", timeout=30, isolation_level=None)
        with contextlib.closing(database):
            yield database


def _processes() -> Iterator[tuple[int, bytes, bytes]]:
    """Every process that can be read and isn't a zombie: pid, environment, command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if environ := (entry / "environ").read_bytes():
                    yield int(entry.name), environ, (entry / "cmdline").read_bytes()
