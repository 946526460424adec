"""Whole jobs: a real runner, a real API over HTTP, real commands."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from dstackweb.runner.pyz import build_pyz
from tests.runner.conftest import Job
from tests.runner.test_archive import member, packed
from tests.support import REPO, eventually

MakeJob = Callable[..., Job]
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def test_a_job_is_claimed_executed_logged_and_told(make_job: MakeJob) -> None:
    job = make_job("echo hello", "echo trouble >&2; pwd")
    answer = job.launch()
    end = job.end()
    log = f"hello\ntrouble\n{job.run_dir}\n".encode()
    assert end == {"exit_code": 0, "reason": "done_by_runner", "message": "", "log_size": len(log)}
    assert bytes(job.api.log) == log
    assert list(dict.fromkeys(job.api.calls)) == ["claim", "spec", "heartbeat", "started", "logs", "exit"]
    assert answer == {"pid": job.runner}


def test_output_shows_while_the_job_runs(make_job: MakeJob) -> None:
    job = make_job(f"{sys.executable} -S -c 'print(\"early\"); import time; time.sleep(60)'")
    job.launch()
    eventually(lambda: bytes(job.api.log) == b"early\n")
    assert job.api.exit is None


def test_any_bytes_pass(make_job: MakeJob) -> None:
    job = make_job(r"printf '\377\376\000\033[31mred\r\n'")
    job.launch()
    job.end()
    assert bytes(job.api.log) == b"\xff\xfe\0\x1b[31mred\r\n"


def test_a_command_that_is_not_found_is_explained(make_job: MakeJob) -> None:
    job = make_job("no-such-command", orders={"path": "/usr/bin:/bin"})
    job.launch()
    end = job.end()
    assert (end["reason"], end["exit_code"]) == ("container_exited_with_error", 127)
    assert end["message"] == "command not found (exit code 127): see the log's last lines"
    assert b"no-such-command: not found" in job.api.log


def test_a_death_by_signal_is_told_as_shells_do(make_job: MakeJob) -> None:
    job = make_job("kill -SEGV $$")
    job.launch()
    end = job.end()
    assert (end["exit_code"], end["message"]) == (139, "killed by SIGSEGV (exit code 139)")


def test_secrets_are_masked_also_when_they_come_in_pieces(make_job: MakeJob) -> None:
    job = make_job(
        "printf 'a hunt'; sleep 0.3; echo 'er2 z'; echo $TOKEN", redact=["hunter2"], env={"TOKEN": "hunter2"}
    )
    job.launch()
    job.end()
    assert bytes(job.api.log) == b"a ******* z\n*******\n"


def test_a_flood_stays_bounded_on_disk_and_in_memory(make_job: MakeJob) -> None:
    job = make_job("head -c 200000000 /dev/zero | tr '\\0' x", "echo $PPID; sleep 0.3", log_limit=1 << 20)
    job.launch()
    peak = 0
    while job.runner_lives():
        with contextlib.suppress(FileNotFoundError):
            assert sum(path.stat().st_size for path in job.state_dir.iterdir()) < (1 << 20) + 10_000
        peak = max(peak, _resident(job.runner))
        time.sleep(0.01)
    assert 0 < peak < 64 << 20
    assert job.end()["exit_code"] == 0
    assert bytes(job.api.log) == b"x" * (1 << 20) + (
        b"\n[dstackweb: the log reached its limit of 1 MB; what followed is lost]\n"
    )


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (FileNotFoundError, ProcessLookupError):
        return 0


def test_the_token_reaches_neither_commands_nor_disk_nor_a_list_of_processes(make_job: MakeJob) -> None:
    job = make_job("env", "echo shell $$; sleep 60", env={"SECRET": "s3cr3t-value"})
    job.launch()
    found = eventually(lambda: re.search(rb"shell (\d+)\n", job.api.log))
    assert found is not None
    shell = int(found[1])
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (job.runner, shell)]
    environment = Path(f"/proc/{shell}/environ").read_bytes()
    for where in (bytes(job.api.log), *lines, environment):
        assert job.api.token.encode() not in where
        assert b"the server's own" not in where
    assert b"s3cr3t-value" not in b"".join(lines)
    for path in job.state_dir.iterdir():
        assert job.api.token.encode() not in path.read_bytes(), path


@ROOT_ONLY
def test_a_runners_memory_and_environment_are_closed_to_its_own_user(make_job: MakeJob, place: Path) -> None:
    """Root reads everything; so the whole runner is one of `nobody`'s, and so are its commands."""
    job = make_job("cat /proc/$PPID/environ && echo open || echo closed")
    nobody = pwd.getpwnam("nobody")
    for folder in ("jobs", "runs"):
        (place / folder).mkdir()
        os.chown(place / folder, nobody.pw_uid, nobody.pw_gid)
    pyz = place / "runner.pyz"
    build_pyz(pyz)
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("there is no Python that other users may start")
    subprocess.run(
        [python, pyz], input=json.dumps(job.orders), text=True, user="nobody", group=nobody.pw_gid, extra_groups=[],
        check=True, capture_output=True, env={"SECRET": "in the environment"}, cwd="/",
    )  # fmt: skip
    job.end()
    assert job.api.log.endswith(b"closed\n")
    assert b"in the environment" not in job.api.log


@ROOT_ONLY
def test_another_user_runs_the_commands_with_its_own_rights(make_job: MakeJob, place: Path) -> None:
    job = make_job(
        "id -un; id -gn; echo $HOME; umask",
        "echo mine > file; echo on >> /dev/stdout; echo err > /dev/stderr",
        f"ls {place}/jobs 2>/dev/null || echo closed",
        f"cat {place}/secret 2>/dev/null || echo closed",
        orders={"user": "nobody"},
    )
    (place / "secret").write_text("x")
    (place / "secret").chmod(0o600)
    (place / "jobs").mkdir(mode=0o700)
    job.launch()
    job.end()
    group = subprocess.run(["id", "-gn", "nobody"], capture_output=True, text=True, check=True).stdout.strip()
    expected = ["nobody", group, str(job.run_dir), "0022", "on", "err", "closed", "closed"]
    assert job.api.log.decode().splitlines() == expected
    assert (job.run_dir / "file").owner() == "nobody"
    assert job.run_dir.stat().st_mode & 0o777 == 0o700


def test_shipped_code_is_there_before_the_commands_and_later_attempts_keep_what_became_of_it(
    make_job: MakeJob,
) -> None:
    code = packed(member("main.sh", b"cat state; echo resumed > state"), member("state", b"fresh\n")).getvalue()
    archive = {"sha256": sha256(code).hexdigest(), "size": len(code)}
    orders = {"user": "nobody"} if os.getuid() == 0 else {}
    first = make_job("sh main.sh", archive=archive, orders=orders)
    first.api.archive = code
    first.launch()
    first.end()
    second = make_job("sh main.sh", archive=archive, orders=orders | {"run_dir": str(first.run_dir)})
    second.api.archive = code
    second.launch()
    second.end()
    assert (bytes(first.api.log), bytes(second.api.log)) == (b"fresh\n", b"resumed\n")
    assert (first.api.count("archive"), second.api.count("archive")) == (1, 0)


def test_code_that_is_not_what_was_uploaded_is_not_executed(make_job: MakeJob) -> None:
    job = make_job("echo never", archive={"sha256": "0" * 64, "size": 1})
    job.api.archive = b"x"
    job.launch()
    end = job.end()
    assert (end["exit_code"], end["reason"]) == (None, "executor_error")
    assert "not the code that was uploaded" in end["message"]
    assert not job.api.log


@pytest.mark.parametrize(
    ("orders", "spec", "reason", "words"),
    [
        ({"user": "no-such-user"}, {}, "executor_error", "no user 'no-such-user'"),
        ({}, {"working_dir": "nowhere"}, "executor_error", "working_dir 'nowhere' does not exist"),
        ({"run_dir": "/proc/none/node-0"}, {}, "executor_error", "/proc/none"),
        ({}, {"image": "ubuntu"}, "creating_container_error", "no containers"),
    ],
)
def test_what_cant_be_started_says_why(
    make_job: MakeJob, orders: dict[str, str], spec: dict[str, str], reason: str, words: str
) -> None:
    job = make_job("echo never", orders=orders, **spec)
    job.launch()
    end = job.end()
    assert (end["exit_code"], end["reason"]) == (None, reason)
    assert words in end["message"]


def test_nodes_wait_for_each_other_and_then_start(make_job: MakeJob) -> None:
    job = make_job("echo together")
    job.api.action = {"action": "wait", "heartbeat_s": 0.05}
    job.launch()
    eventually(lambda: job.api.phases.count("waiting") >= 3)
    assert not (job.state_dir / "started").exists()
    job.api.action = {"action": "go"}
    assert job.end()["exit_code"] == 0


def test_a_job_that_is_stopped_while_it_waits_never_starts(make_job: MakeJob) -> None:
    job = make_job("echo never")
    job.api.action = {"action": "stop", "grace_s": 0, "reason": "failed_to_start_due_to_no_capacity"}
    job.launch()
    end = job.end()
    assert (end["exit_code"], end["reason"]) == (None, "failed_to_start_due_to_no_capacity")
    assert not job.api.log
    assert job.api.count("started") == 0


def test_the_runner_as_one_file_does_the_same(make_job: MakeJob, place: Path) -> None:
    pyz = place / "runner.pyz"
    build_pyz(pyz)
    job = make_job("echo from a zip")
    job.launch(str(pyz))
    assert job.end()["exit_code"] == 0
    assert bytes(job.api.log) == b"from a zip\n"


def test_launching_is_quick(make_job: MakeJob) -> None:
    """A part of the second from submit to running. The best of three: other tests use the machine too."""
    for _ in range(3):
        job = make_job("true")
        before = time.monotonic()
        job.launch()
        eventually(partial(job.api.count, "claim"), every=0.002)
        if time.monotonic() - before < 0.4:
            return
    pytest.fail("three launches took 0.4 s and more to the claim")


def test_orders_that_cant_be_followed_are_refused_at_once(make_job: MakeJob) -> None:
    job = make_job("true", orders={"api": "http://example.org"})
    with pytest.raises(AssertionError, match="plain HTTP is for this machine only"):
        job.launch()
    assert not job.state_dir.exists()


def test_the_runner_is_plain_python_3_9() -> None:
    """It runs on foreign machines."""
    for path in (REPO / "dstackweb" / "runner").glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 9))
