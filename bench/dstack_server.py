"""dstack's own server with many ended runs, as a peer for lists.

It is installed in an environment of its own: `pip install "dstack[server]"`. Its first run is submitted over its API,
and copied in its database (SQLite), jobs included. They have ended, so that it has nothing to do beside the requests.
(No ANALYZE, which dstack does not run either: it chose another index for lists, and they took six times as long.)
"""

from __future__ import annotations

import datetime as dt
import json
import os
import sqlite3
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.support import eventually, free_port

TOKEN = "dstack-bench"  # noqa: S105  of a server of its own
RUN = "train-of-the-bench"
SPEC = {
    "run_name": RUN,
    "repo_id": "none",
    "repo_data": {"repo_type": "virtual"},
    "configuration": {"type": "task", "name": RUN, "commands": ["true"], "resources": {"gpu": 8}},
    "configuration_path": "run.dstack.yml",
    "ssh_key_pub": "ssh-ed25519 AAAA bench",
    "profile": {"name": "default"},
}
LIST = "/api/runs/list"
ENDED = {
    "runs": ("FAILED", "JOB_FAILED"),
    "jobs": ("FAILED", "FAILED_TO_START_DUE_TO_NO_CAPACITY"),
}


@contextmanager
def filled(program: str, home: Path, runs: int) -> Iterator[int]:
    """A server of this program with so many runs. Yields its port."""
    port = free_port()
    with _server(program, home, port):
        plan = {"run_spec": SPEC, "current_resource": None}
        _post(port, "/api/project/main/runs/apply", {"plan": plan, "force": True})
    _copy(home / ".dstack/server/data/sqlite.db", runs)
    with _server(program, home, port):
        yield port


def body(limit: int) -> bytes:
    """Of a request for the newest runs."""
    return json.dumps({"project_name": "main", "limit": limit}).encode()


def version(program: str) -> str:
    """`0.22.5`."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def _server(program: str, home: Path, port: int) -> Iterator[None]:
    env = os.environ | {"HOME": str(home), "DSTACK_SERVER_ADMIN_TOKEN": TOKEN, "DO_NOT_TRACK": "1"}
    with open(home / "server.log", "ab") as log:
        command = [program, "server", "--port", str(port), "--yes"]
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        eventually(lambda: _answers(port), deadline=120)
        yield
    finally:
        process.terminate()
        process.wait(60)


def _answers(port: int) -> bool:
    try:
        return isinstance(_post(port, LIST, {"project_name": "main", "limit": 1}), list)
    except (urllib.error.URLError, ConnectionError):
        return False


def _post(port: int, path: str, values: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(values).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _copy(path: Path, runs: int) -> None:
    """Make `runs` of the one run there is, a second apart, each with a copy of its job; all have ended."""
    first_at = dt.datetime(2026, 1, 1)
    with closing(sqlite3.connect(path)) as database:
        database.row_factory = sqlite3.Row
        run, job = (dict(database.execute(f"SELECT * FROM {table}").fetchone()) for table in ("runs", "jobs"))
        for values, table in ((run, "runs"), (job, "jobs")):
            values["status"], values["termination_reason"] = ENDED[table]
        for number in range(1, runs):
            name, key = f"train-{number}", uuid.uuid4().hex
            at = f"{first_at + dt.timedelta(seconds=number):%Y-%m-%d %H:%M:%S.%f}"
            spec = run["run_spec"].replace(RUN, name)
            _insert(database, "runs", run | {"id": key, "run_name": name, "run_spec": spec, "submitted_at": at})
            _insert(database, "jobs", job | {"id": uuid.uuid4().hex, "run_id": key, "run_name": name})
        for table, ended in ENDED.items():
            database.execute(f"UPDATE {table} SET status = ?, termination_reason = ?", ended)
        database.commit()


def _insert(database: sqlite3.Connection, table: str, values: dict[str, Any]) -> None:
    marks = ", ".join("?" * len(values))
    database.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", list(values.values()))
