"""Processes of the product die at the worst moment: every run ends in the right status, and no attempt runs twice."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.server import Server
from tests.support import eventually

pytestmark = [pytest.mark.slow, pytest.mark.both_sides, pytest.mark.xdist_group("faults")]

COUNTED = ("echo once >> executed", "for i in 1 2 3 4 5 6 7 8; do echo line $i; sleep 0.25; done")
LINES = b"".join(b"line %d\n" % i for i in range(1, 9))


def begun(server: Server, *commands: str, **keys: object) -> str:
    """Submit, and wait for the first line."""
    name = server.submit(*(commands or COUNTED), **keys)
    eventually(lambda: b"line 1" in server.log(name), deadline=60)
    return name


def kill(server: Server, needle: str) -> None:
    """SIGKILL every process of a role."""
    pids = server.role_pids(needle)
    assert pids, needle
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def assert_ran_once_and_reported_all(server: Server, name: str) -> None:
    run = server.wait(name, deadline=60)
    assert run["status"] == "done", run
    assert server.log(name) == LINES
    assert server.file_of(run, "executed") == "once\n"


def test_a_killed_web_server_costs_no_line(server: Server) -> None:
    name = begun(server)
    kill(server, "gunicorn")
    eventually(lambda: server.run(name), deadline=60)
    assert_ran_once_and_reported_all(server, name)


def test_killed_workers_start_no_run_twice(server: Server) -> None:
    names = [begun(server), server.submit(*COUNTED)]
    kill(server, "qcluster")
    for name in names:
        assert_ran_once_and_reported_all(server, name)


def test_a_killed_ticker_and_host_are_back_before_anything_is_lost(server: Server) -> None:
    name = begun(server)
    kill(server, "ticker")
    kill(server, "dstackweb.manage\0host")
    assert_ran_once_and_reported_all(server, name)
    eventually(lambda: server.http.get("/hosts").json()["items"][0]["online"], deadline=60)


def test_a_killed_supervisor_ends_all_but_the_runs_and_the_next_one_finds_them(server: Server) -> None:
    name = begun(server)
    server.stop(signal.SIGKILL)
    eventually(lambda: not server.role_pids("dstackweb.manage") and not server.role_pids("gunicorn"), deadline=60)
    server.start()
    assert_ran_once_and_reported_all(server, name)


@pytest.mark.nightly
def test_a_server_that_is_down_longer_than_every_time_out_loses_nothing(server: Server) -> None:
    name = begun(server)
    run = server.run(name)
    server.stop()
    eventually(lambda: server.processes_of(run) == [], deadline=60)
    threading.Event().wait(4)  # longer than DSTACKWEB_LOST_AFTER_S
    server.start()
    assert_ran_once_and_reported_all(server, name)


@pytest.mark.nightly
def test_a_run_with_retry_stops_by_itself_without_contact_and_is_tried_again(server: Server) -> None:
    name = begun(
        server,
        "echo $$ >> executed",
        "echo line 1",
        "[ $(wc -l < executed) -gt 1 ] || sleep 600",
        retry=True,
        stop_duration=1,
    )
    run = server.run(name)
    server.stop()
    eventually(lambda: server.processes_of(run) == [], deadline=60)
    server.start()
    server.hurry_retry(name)
    run = server.wait(name, deadline=60)
    assert run["status"] == "done"
    executed = len(server.file_of(run, "executed").split())
    assert 2 <= executed <= run["attempt"] <= 3, "a busy machine may lose the second attempt too, and no more"


def test_a_killed_runner_ends_its_processes_and_fails_the_run_with_its_log_complete(server: Server) -> None:
    name = begun(server, "echo once >> executed", "echo line 1", "sleep 600")
    run = server.run(name)
    os.kill(server.runner_pid(run), signal.SIGKILL)
    run = server.wait(name, deadline=60)
    assert (run["status"], run["jobs"][0]["termination_reason"]) == ("failed", "instance_unreachable")
    assert server.log(name) == b"line 1\n"
    assert server.processes_of(run) == []
    assert server.file_of(run, "executed") == "once\n"


def test_a_killed_runner_of_a_run_with_retry_brings_the_next_attempt(server: Server) -> None:
    name = begun(
        server, "echo once >> executed", "echo line 1", "[ $(wc -l < executed) -gt 1 ] || sleep 600", retry=True
    )
    os.kill(server.runner_pid(server.run(name)), signal.SIGKILL)
    server.hurry_retry(name)
    run = server.wait(name, deadline=60)
    assert (run["status"], run["attempt"]) == ("done", 2)


def test_a_database_that_is_locked_for_a_while_delays_and_breaks_nothing(server: Server) -> None:
    locked_for(server, 3)


@pytest.mark.nightly
def test_a_database_that_is_locked_for_ten_seconds_delays_and_breaks_nothing(server: Server) -> None:
    locked_for(server, 10)


def locked_for(server: Server, seconds: float) -> None:
    """Hold the write lock of the SQLite file, or every table of PostgreSQL, in the middle of a run."""
    name = begun(server)
    with server.locked_database():
        threading.Event().wait(seconds)
    assert_ran_once_and_reported_all(server, name)


def test_after_all_this_every_counter_equals_a_recount(server: Server) -> None:
    eventually(lambda: server.manage("recount", "--check").returncode == 0, deadline=60)
