"""logs, and apply once its run is submitted: in processes of their own where something is followed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import attempts, logs
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import Reason
from tests.cli.conftest import Cli, read
from tests.cli.proxy import Proxy
from tests.factories import make_host, make_run, place_all, placed_job, start
from tests.support import eventually

ANY_BYTES = bytes(range(256)) * 3


@pytest.fixture
def job(project: Project, ada: User) -> Job:
    """The job of a run called `train` that is running."""
    make_host()
    run = make_run(project, ada, "train")
    place_all()
    return start(placed_job(run))


def end(job: Job, code: int = 0) -> None:
    reason = Reason.CONTAINER_EXITED_WITH_ERROR if code else Reason.DONE_BY_RUNNER
    attempts.end_job(job.pk, reason, exit_code=code)


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, str]:
    out, err = process.communicate(timeout=10)
    return process.returncode, out, err.decode()


@pytest.mark.usefixtures("live_server")
def test_logs_are_the_very_bytes(cli: Cli, job: Job) -> None:
    logs.append_log(job.pk, 0, ANY_BYTES * 8000)
    code, out, err = finish(cli.spawn("logs", "train"))
    assert (code, err) == (0, "")
    assert out == ANY_BYTES * 8000


def test_tail_node_and_attempt_select_a_part_of_the_log(cli: Cli, job: Job) -> None:
    logs.append_log(job.pk, 0, b"one\ntwo\nthree\n")
    assert cli("logs", "train", "--tail", "2").stdout == "two\nthree\n"
    empty = cli("logs", "train", "--tail", "0")
    assert (empty.stdout, empty.stderr) == ("", "")
    assert cli("logs", "train", "--node", "0", "--attempt", "1").stdout == "one\ntwo\nthree\n"
    assert "train has no node 1. Its only node is 0." in cli("logs", "train", "--node", "1").stderr
    for options in (["--node", "1"], ["--attempt", "2"], ["-f", "--attempt", "2"]):
        assert cli("logs", "train", *options).exit_code in (1, 2)


@pytest.mark.parametrize("options", [[], ["-f"], ["--tail", "1"]])
def test_a_log_without_its_middle_shows_how_much_is_missing(cli: Cli, job: Job, options: list[str]) -> None:
    logs.append_log(job.pk, 0, b"first\nlast\n")
    attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0, log_missing=3 << 20)
    result = cli("logs", "train", *options)
    assert result.stdout.endswith("last\n")
    assert result.stderr.count("The log was over its limit: 3 MB of output are missing before its last part.") == 1


def test_a_log_that_was_cut_shows_how_much_was_not_kept(cli: Cli, job: Job) -> None:
    logs.append_log(job.pk, 0, b"first\n")
    Job.objects.filter(pk=job.pk).update(log_cut="project_quota", log_size=6)
    attempts.report_end(job.pk, Reason.DONE_BY_RUNNER, exit_code=0, log_size=6 + (3 << 20))
    result = cli("logs", "train")
    assert result.stdout == "first\n"
    words = "The project's logs had reached their quota. 3 MB after its last line was not kept."
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("options", [[], ["-f"], ["--tail", "1"]])
def test_a_lost_log_is_an_error_and_not_empty(cli: Cli, job: Job, options: list[str]) -> None:
    logs.append_log(job.pk, 0, b"first\n")
    attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0, log_size=9)
    result = cli("logs", "train", *options)
    assert (result.exit_code != 0, result.stdout) == (True, "first\n")
    assert "had 9 bytes, and 6 of them" in " ".join(result.stderr.split())


def test_without_output_the_status_is_shown(cli: Cli, project: Project, ada: User) -> None:
    make_run(project, ada, "waiting")
    result = cli("logs", "waiting")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "No output yet. waiting: submitted, position 1" in result.stderr


@pytest.mark.usefixtures("live_server")
def test_a_followed_log_is_streamed_and_ends_with_the_run(cli: Cli, job: Job) -> None:
    logs.append_log(job.pk, 0, b"first\n")
    following = cli.spawn("logs", "-f", "train")
    assert read(following, 6) == b"first\n"
    logs.append_log(job.pk, 6, ANY_BYTES)
    assert read(following, len(ANY_BYTES)) == ANY_BYTES
    logs.append_log(job.pk, 6 + len(ANY_BYTES), b"last")
    end(job)
    code, out, err = finish(following)
    assert (code, out) == (0, b"last")
    assert "train: done" in err


@pytest.mark.usefixtures("live_server")
def test_a_followed_tail_continues_after_it(cli: Cli, job: Job) -> None:
    logs.append_log(job.pk, 0, b"one\ntwo\n")
    following = cli.spawn("logs", "-f", "--tail", "1", "train")
    assert read(following, 4) == b"two\n"
    logs.append_log(job.pk, 8, b"three\n")
    end(job)
    assert finish(following)[1] == b"three\n"


@pytest.mark.usefixtures("live_server")
def test_following_continues_with_the_next_attempt(cli: Cli, project: Project, ada: User) -> None:
    make_host()
    run = make_run(project, ada, "train", retry=True)
    place_all()
    first = start(placed_job(run))
    logs.append_log(first.pk, 0, b"first\n")
    following = cli.spawn("logs", "-f", "train")
    assert read(following, 6) == b"first\n"
    end(first, 1)
    attempts.requeue_due(timezone.now() + timedelta(hours=1))
    place_all()
    second = start(placed_job(run))
    logs.append_log(second.pk, 0, b"second\n")
    end(second)
    code, out, err = finish(following)
    assert (code, out) == (0, b"second\n")
    assert "Attempt 2" in err


@pytest.mark.slow
def test_following_survives_a_restart_of_the_server_without_a_byte_lost_or_doubled(
    connect: Callable[..., Cli], proxy: Proxy, ada: User, job: Job
) -> None:
    cli = connect(ada, proxy.url)
    logs.append_log(job.pk, 0, b"before\n")
    following = cli.spawn("logs", "-f", "train")
    assert read(following, 7) == b"before\n"
    proxy.down()
    logs.append_log(job.pk, 7, b"meanwhile\n")
    assert following.stderr is not None
    assert b"Trying again" in following.stderr.readline()
    proxy.up()
    assert read(following, 10) == b"meanwhile\n"
    assert b"Connected again" in following.stderr.readline()
    logs.append_log(job.pk, 17, b"after\n")
    end(job)
    assert finish(following)[:2] == (0, b"after\n")


def test_an_interrupted_answer_is_resumed_where_it_broke_off(
    connect: Callable[..., Cli], proxy: Proxy, ada: User, job: Job
) -> None:
    cli = connect(ada, proxy.url)
    following = cli.spawn("logs", "-f", "train")
    data = ANY_BYTES * 2000
    logs.append_log(job.pk, 0, data[:10])
    assert read(following, 10) == data[:10]
    proxy.cut_after = 100_000
    logs.append_log(job.pk, 10, data[10:])
    end(job)
    code, out, _err = finish(following)
    assert (code, out == data[10:]) == (0, True)


HELLO = "type: task\nname: hello\ncommands: [echo hello]\n"


def submitted(cli: Cli, *options: str) -> subprocess.Popen[bytes]:
    """`apply` in a process of its own, once its run is there."""
    cli.file(HELLO)
    process = cli.spawn("apply", "-f", "run.yaml", *options)
    eventually(Run.objects.exists)
    return process


def placed(deadline: float = 5) -> Job:
    make_host()
    place_all()
    return start(placed_job(Run.objects.get()))


@pytest.mark.usefixtures("live_server")
@pytest.mark.parametrize("code", [0, 3])
def test_apply_follows_to_the_end_and_exits_as_the_run_did(cli: Cli, project: Project, code: int) -> None:
    applying = submitted(cli, "--force")
    job = placed()
    logs.append_log(job.pk, 0, b"hello\n")
    end(job, code)
    exit_code, out, err = finish(applying)
    assert (exit_code, out) == (code, b"hello\n")
    assert "SETTING" in err
    assert f"hello: {'failed' if code else 'done'}" in err


@pytest.mark.usefixtures("live_server")
def test_a_run_that_is_stopped_makes_apply_fail(cli: Cli, project: Project) -> None:
    applying = submitted(cli, "--force")
    assert cli("stop", "hello").exit_code == 0
    code, _out, err = finish(applying)
    assert code == 1
    assert "hello: terminated" in err


@pytest.mark.usefixtures("live_server")
def test_ctrl_c_leaves_the_run_running_and_shows_how_to_follow_it_again(cli: Cli, project: Project) -> None:
    applying = submitted(cli, "--force")
    job = placed()
    logs.append_log(job.pk, 0, b"hello\n")
    assert read(applying, 6) == b"hello\n"
    applying.send_signal(signal.SIGINT)
    code, _out, err = finish(applying)
    assert code == 130
    assert "The run continues" in err
    assert "dstackweb logs -f hello" in err
    assert "dstackweb stop hello" in err
    assert "Traceback" not in err
    assert Run.objects.get().status == "running"


@pytest.mark.usefixtures("live_server")
def test_a_closed_pipe_ends_the_command_quietly(cli: Cli, job: Job) -> None:
    logs.append_log(job.pk, 0, b"x\n" * 1_000_000)
    following = cli.spawn("logs", "train")
    assert following.stdout is not None
    assert read(following, 2) == b"x\n"
    following.stdout.close()
    assert following.stderr is not None
    assert (following.wait(5), following.stderr.read()) == (1, b"")
