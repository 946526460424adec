"""What commands may do to a run: each ends in the right status, with its log, and leaves no process behind."""

from __future__ import annotations

import re

import pytest

from tests.server import Server
from tests.support import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faults")]


def test_a_command_that_is_not_found_fails_the_run_with_127(server: Server) -> None:
    run = server.wait(server.submit("echo before", "no-such-command", "echo never"))
    assert (run["status"], run["exit_code"], run["termination_reason"]) == ("failed", 127, "job_failed")
    assert "not found" in run["status_message"]
    log = server.log(run["name"])
    assert log.startswith(b"before\n")
    assert b"never" not in log


@pytest.mark.nightly
def test_a_fresh_deployment_gives_runs_the_seeded_profile(server: Server) -> None:
    run = server.run(server.submit("true"))
    assert (run["spec"]["backends"], run["spec"]["max_duration_s"]) == (["hosts"], 24 * 3600)
    assert run["provenance"]["max_duration"] == {"source": "profile", "profile": "default"}


@pytest.mark.nightly
def test_output_may_be_any_bytes(server: Server) -> None:
    run = server.wait(server.submit(r"printf '\377\376\000\033[31mred\r\n'"))
    assert run["status"] == "done"
    assert server.log(run["name"]) == b"\xff\xfe\x00\x1b[31mred\r\n"


def test_a_flood_of_output_loses_its_middle_and_the_log_shows_how_much(server: Server) -> None:
    # No secret has this character. Where the log is cut, a secret's first one would be masked.
    run = server.wait(server.submit("head -c 200000000 /dev/zero | tr '\\0' '#'", "echo done"), deadline=60)
    assert run["status"] == "done"
    log = server.log(run["name"])
    missing = run["jobs"][0]["log_missing"]
    assert (7 << 17) - 200 <= len(log) < (1 << 20) + 200
    assert log.endswith(b"####done\n")
    assert f"{missing:,} bytes of output are missing here".encode() in log
    assert log.count(b"#") + missing == 200_000_000


def test_a_job_over_its_memory_is_killed_with_that_reason_and_its_neighbour_survives(server: Server) -> None:
    """Where the host can make no cgroups, it says why, and the job ends as any other."""
    (host,) = server.http.get("/hosts").json()["items"]
    neighbour = server.submit("while [ ! -e enough ]; do sleep 0.1; done", resources={"memory": "64MB"})
    server.wait(neighbour, "running", deadline=60)
    eat = "python3 -S -c 'print(len(bytes(1) * (200 << 20)))'"
    run = server.wait(server.submit(eat, resources={"memory": "64MB"}), deadline=60)
    if host["cgroups"]["memory"]:
        assert (run["status"], run["jobs"][0]["termination_reason"]) == ("failed", "out_of_memory")
        assert "It needed more than its limit of 64 MB" in run["status_message"]
    else:
        assert host["cgroups"]["code"]
        assert run["status"] == "done"
    assert server.run(neighbour)["status"] == "running"
    server.api("POST", f"runs/{neighbour}/stop", json={"abort": True})


def test_a_command_that_ignores_term_is_killed_after_stop_duration(server: Server) -> None:
    name = server.submit("trap '' TERM", "echo ready", "while :; do sleep 0.1; done", stop_duration=1)
    eventually(lambda: b"ready" in server.log(name), deadline=60)
    server.api("POST", f"runs/{name}/stop")
    run = server.wait(name)
    assert (run["status"], run["termination_reason"]) == ("terminated", "stopped_by_user")
    assert server.processes_of(run) == []


@pytest.mark.nightly
def test_abort_kills_at_once(server: Server) -> None:
    name = server.submit("trap '' TERM", "echo ready", "while :; do sleep 0.1; done", stop_duration=600)
    eventually(lambda: b"ready" in server.log(name), deadline=60)
    server.api("POST", f"runs/{name}/stop", json={"abort": True})
    run = server.wait(name)
    assert (run["status"], run["termination_reason"]) == ("terminated", "aborted_by_user")


def test_a_daemon_that_a_command_leaves_behind_ends_with_the_run(server: Server) -> None:
    run = server.wait(server.submit("(setsid sh -c 'sleep 600' >/dev/null 2>&1 &)", "echo left one"))
    assert run["status"] == "done"
    assert server.processes_of(run) == []


def test_max_duration_ends_a_run_in_the_name_of_its_limit(server: Server) -> None:
    run = server.wait(server.submit("sleep 60", max_duration=1, stop_duration=1))
    assert (run["status"], run["termination_reason"]) == ("terminated", "max_duration_exceeded")


def test_a_node_that_fails_stops_the_others_and_all_met_before_the_start(server: Server) -> None:
    name = server.submit(
        'echo "rank $DSTACK_NODE_RANK of $DSTACK_NODES_NUM"',
        '[ "$DSTACK_NODE_RANK" = 0 ] || { sleep 1; exit 7; }',
        "sleep 60",
        nodes=2,
    )
    run = server.wait(name)
    assert (run["status"], run["exit_code"]) == ("failed", 7)
    assert [re.findall(rb"rank \d of 2", server.log(name, node=node)) for node in (0, 1)] == [
        [b"rank 0 of 2"],
        [b"rank 1 of 2"],
    ]
    assert server.processes_of(run) == []


@pytest.mark.nightly
def test_a_failed_attempt_is_retried_in_the_same_directory(server: Server) -> None:
    name = server.submit("echo try >> tries", "cat tries", '[ "$(wc -l < tries)" -ge 2 ]', retry=True)
    server.hurry_retry(name)
    run = server.wait(name, deadline=60)
    assert (run["status"], run["attempt"]) == ("done", 2)
    assert server.log(name, attempt=1) == b"try\n"
    assert server.log(name) == b"try\ntry\n"


@pytest.mark.nightly
def test_a_displaced_run_saves_its_state_makes_room_and_goes_on_where_it_was(server: Server) -> None:
    (host,) = server.http.get("/hosts").json()["items"]
    whole = {"cpu": host["cpus"]}
    server.api("POST", "queues", json={"name": "shared", "preempt_points": 20})
    low = server.submit(
        'trap "echo saved >> state; exit 3" TERM',
        'echo "displaced: ${DSTACK_PREEMPTED-never}"',
        "[ ! -e state ] || { cat state; exit 0; }",
        "while :; do sleep 0.1; done",
        queue="shared", priority=10, preemptible=True, resources=whole,
    )  # fmt: skip
    eventually(lambda: b"never" in server.log(low), deadline=60)
    urgent = server.submit("echo made it", queue="shared", priority=60, resources=whole)
    try:
        first, again = server.wait(urgent), server.wait(low)
    finally:  # it would keep the whole host from the tests after this one
        server.http.post(f"/projects/main/runs/{low}/stop", json={"abort": True})
    assert (first["status"], again["status"], again["attempt"]) == ("done", "done", 2)
    assert server.log(low, attempt=1).startswith(b"displaced: never\n")
    assert server.log(low) == b"displaced: 1\nsaved\n"
    assert first["started_at"] < again["jobs"][0]["started_at"]
    shown = [event["detail"] for event in server.api("GET", f"runs/{low}/events").json()["items"]]
    assert any(f"displaced by {urgent} of " in text for text in shown), shown
