"""PostgreSQL or Redis dies or hangs while people move runs: they see it, nothing is lost, and all goes on after."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg
import pytest

from tests import servers
from tests.server import Server
from tests.setup_lock import set_up_elsewhere
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("databases")]
NAMES = ("one", "two", "three", "four")


@dataclass
class Team:
    """A deployment on a PostgreSQL and a Redis of its own, with four runs that wait for a GPU there isn't."""

    server: Server
    postgres: servers.Server
    redis: servers.Server

    def order(self) -> list[str]:
        return [item["name"] for item in self.server.api("GET", "queues/default").json()["items"]]

    def move_to_top(self, name: str) -> httpx.Response:
        return self.server.http.post("/projects/main/queues/default/move", json={"run": name, "top": True})

    def undo(self, move: int) -> httpx.Response:
        return self.server.http.post("/projects/main/queues/default/undo", json={"move": move})

    def count(self, table: str) -> int:
        with psycopg.connect(self.postgres.url) as database:
            row = database.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with tempfile.TemporaryDirectory(prefix="faults-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as folder:
        home = Path(folder)
        home.chmod(0o755)
        postgres, redis = servers.postgres(home / "postgres", durable=True), servers.redis(home / "redis")
        urls = {"DATABASE_URL": postgres.url, "REDIS_URL": redis.url}
        with Server(home, **urls, DSTACKWEB_PASS_EVERY_S="0.5") as server:
            for name in NAMES:
                server.submit("true", name=name, resources={"gpu": 1})
            yield Team(server, postgres, redis)
        redis.stop()
        postgres.stop()


def crash(postgres: servers.Server) -> None:
    """As a power cut: nothing is written that was not, and it recovers when it starts."""
    assert postgres.process is not None
    postgres.process.send_signal(signal.SIGQUIT)
    postgres.process.wait(20)


@contextlib.contextmanager
def hung(process: servers.Server) -> Iterator[None]:
    """It takes connections, and answers nobody."""
    assert process.process is not None
    process.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.process.send_signal(signal.SIGCONT)


def test_a_postgresql_that_dies_during_a_move_is_an_error_and_the_move_is_atomic(team: Team) -> None:
    before, moves = team.order(), team.count("runs_move")
    answers: list[httpx.Response] = []
    holder, watcher = psycopg.connect(team.postgres.url), psycopg.connect(team.postgres.url, autocommit=True)
    with contextlib.closing(holder), contextlib.closing(watcher):
        holder.execute("SELECT 1 FROM runs_queue FOR UPDATE")  # what a move takes first, so that it waits
        mover = threading.Thread(target=lambda: answers.append(team.move_to_top("four")))
        mover.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        eventually(lambda: watcher.execute(waits).fetchone() != (0,), deadline=60)
        crash(team.postgres)
    mover.join(20)
    away = team.move_to_top("four")
    team.postgres.start()
    for answer in (*answers, away):
        assert answer.status_code == 503
        assert "database is not responding" in answer.json()["detail"]
        assert answer.headers["Retry-After"] == "5"
    assert eventually(team.order, deadline=60) == before
    assert team.count("runs_move") == moves
    made = team.move_to_top("four")
    assert made.status_code == 200, made.text
    assert team.order() == ["four", *(name for name in before if name != "four")]
    assert team.undo(made.json()["move"]).status_code == 200
    assert team.order() == before


def test_a_transaction_that_holds_the_queues_keeps_no_reader_and_no_heartbeat_waiting(team: Team) -> None:
    """And writers for five seconds at most: then they are told to come again, and nothing of theirs was done."""
    run = {"config": {"type": "task", "commands": ["true"], "resources": {"gpu": 1}}}
    answers: list[httpx.Response] = []
    took_s: list[float] = []

    def submit() -> None:
        answers.append(team.server.http.post("/projects/main/runs", json=run))

    waiting = team.count("runs_run")
    holder = psycopg.connect(team.postgres.url)
    with contextlib.closing(holder):
        # A session that is not ours may keep them for ever: no time-out of ours ends it.
        holder.execute("SET idle_in_transaction_session_timeout = 0")
        for table in ("runs_queue", "runs_queuecount"):
            holder.execute(f"SELECT 1 FROM {table} FOR UPDATE".encode())
        writers = [threading.Thread(target=submit) for _ in range(24)]
        for writer in writers:
            writer.start()
        ends = time.monotonic() + 12
        while time.monotonic() < ends:
            began = time.monotonic()
            assert httpx.get(f"{team.server.url}/readyz", timeout=20).status_code == 200
            took_s.append(time.monotonic() - began)
        for writer in writers:
            writer.join(60)
    assert max(took_s) < 2, f"the longest of {len(took_s)}"
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.headers["Retry-After"] for answer in answers} == {"5"}
    assert team.count("runs_run") == waiting
    assert eventually(lambda: team.server.http.post("/projects/main/runs", json=run).is_success, deadline=30)


def test_a_run_is_moved_and_undone_without_redis_and_work_resumes_once_it_is_back(team: Team) -> None:
    before = team.order()
    team.redis.kill()
    made = team.move_to_top("three")
    assert made.status_code == 200, made.text
    assert team.order()[0] == "three"
    assert team.undo(made.json()["move"]).status_code == 200
    assert team.order() == before
    name = team.server.submit("true", resources={"cpu": 1})
    team.redis.start()
    assert team.server.wait(name, deadline=60)["status"] == "done"


def test_a_redis_that_hangs_delays_a_move_and_loses_nothing(team: Team) -> None:
    before = team.order()
    with hung(team.redis):
        made = team.move_to_top("two")
        assert made.status_code == 200, made.text
    assert team.order()[0] == "two"
    assert team.undo(made.json()["move"]).status_code in (200, 409)  # by then it may be too late to take it back
    assert sorted(team.order()) == sorted(before)


def test_after_all_this_every_counter_equals_a_recount(team: Team) -> None:
    eventually(lambda: team.server.manage("recount", "--check").returncode == 0, deadline=60)


def test_a_server_that_starts_while_postgresql_restarts_comes_up(open_home: Path) -> None:
    postgres = servers.postgres(open_home / "postgres", durable=True)
    server = Server(open_home, migrated=False, DATABASE_URL=postgres.url)
    try:
        with contextlib.suppress(psycopg.OperationalError), set_up_elsewhere(postgres.url):
            server.launch()
            eventually(lambda: "another process is setting up this database" in server.said())
            crash(postgres)
        eventually(lambda: "the database is away, will retry" in server.said())
        postgres.start()
        eventually(server.is_ready, deadline=120)
    finally:
        server.stop()
        postgres.stop()
