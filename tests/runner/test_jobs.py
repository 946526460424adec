"""What a job is started with, and how its end is reported: one real runner per test."""

from __future__ import annotations

import io
import os
import pwd
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner.jobs import LocalJobs
from tests.runner.conftest import OTHER_USER, Box
from tests.support import eventually

MakeBox = Callable[..., Box]
as_root = pytest.mark.needs("root")


def test_a_job_runs_from_claim_to_exit(box: MakeBox) -> None:
    job = box("echo one", "echo two >&2")
    assert job.launch() == {"pid": job.pid}
    end = job.end()
    assert end == {"exit_code": 0, "reason": "done_by_runner", "message": "", "log_size": 8, "log_missing": 0}
    assert job.api.log == b"one\ntwo\n"
    names = [call.what for call in job.api.calls]
    assert names[:2] == ["claim", "spec"]
    assert names.index("heartbeat") < names.index("started") < names.index("logs") < names.index("exit")
    assert [names.count(once) for once in ("claim", "spec", "started", "exit")] == [1, 1, 1, 1]
    beats = [call.said["beat"] for call in job.api.calls if call.what == "heartbeat"]
    assert beats == sorted(set(beats))


def test_what_was_started_is_named_by_the_ticket_of_its_spec(box: MakeBox) -> None:
    job = box("while [ ! -e go ]; do sleep 0.05; done", ticket="signed")
    jobs = LocalJobs(str(job.state.parent.parent))
    assert jobs.tickets() == []
    job.launch()
    eventually(lambda: job.state.joinpath("started").exists())
    named = {"ticket": "signed", "nonce": (job.state / "nonce").read_text()}
    assert jobs.tickets() == [named | {"ended": False}]
    (job.run_dir / "go").touch()
    job.end()
    assert jobs.tickets() == [named | {"ended": True}]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("no-such-command", 127),
        ("touch file; ./file", 126),
        ("exit 3", 3),
        ("false && true", 1),
        ("kill -KILL $$", 137),
        ("kill -SEGV $$", 139),
    ],
)
def test_a_failure_is_reported_with_its_exit_code(box: MakeBox, command: str, code: int) -> None:
    job = box("echo before", command, "echo never")
    job.launch()
    end = job.end()
    assert (end["exit_code"], end["reason"], end["message"]) == (code, "container_exited_with_error", "")
    assert job.lines()[0] == "before"
    assert "never" not in job.lines()


def test_commands_get_the_address_and_token_to_report_tasks(box: MakeBox) -> None:
    path = "/api/v1/projects/main/runs/7/tasks"
    job = box('echo "$DSTACKWEB_TASKS_URL $DSTACKWEB_TASKS_TOKEN"', tasks={"path": path, "token": "t1"})
    job.launch()
    job.end()
    assert job.lines() == [f"{job.api.url}{path} t1"]


def test_output_may_be_any_bytes(box: MakeBox) -> None:
    job = box("head -c 300000 /dev/urandom | tee all", "printf '\\000\\377no newline'")
    job.launch()
    job.end()
    assert job.api.log == (job.run_dir / "all").read_bytes() + b"\0\xffno newline"


def test_the_environment_has_the_documented_variables_and_none_of_the_servers(box: MakeBox) -> None:
    job = box("env -0", gpus=["GPU-a", "GPU-b"], nodes=4, node=2, gpus_per_node=2, gpus_total=8, master_ip="10.0.0.7")
    job.api.spec |= {"env": {"LR": "1e-4", "PATH": "/usr/bin:/bin", "DSTACK_NODE_RANK": "9"}}
    job.api.spec |= {"host": "box-3", "host_address": "10.0.0.9"}
    job.launch()
    job.end()
    env = dict(line.split("=", 1) for line in job.api.log.decode().split("\0") if line)
    account = pwd.getpwnam(OTHER_USER) if OTHER_USER else pwd.getpwuid(os.getuid())
    assert env.pop("HOME") in (account.pw_dir, str(job.run_dir))
    for set_by_shell in ("PWD", "OLDPWD", "SHLVL", "_"):
        env.pop(set_by_shell, None)
    assert env == {
        "USER": account.pw_name,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "LR": "1e-4",
        "DSTACK_RUN_NAME": "night",
        "DSTACK_RUN_ID": job.api.spec["run_uid"],
        "DSTACK_JOB_ID": job.api.job,
        "DSTACK_RUN_DIR": str(job.run_dir),
        "DSTACK_NODES_NUM": "4",
        "DSTACK_NODE_RANK": "2",
        "DSTACK_MASTER_NODE_IP": "10.0.0.7",
        "DSTACK_HOST_NAME": "box-3",
        "DSTACK_HOST_ADDRESS": "10.0.0.9",
        "DSTACK_GPUS_PER_NODE": "2",
        "DSTACK_GPUS_NUM": "8",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "DSTACKWEB_JOB": job.api.job,
    }


def test_the_commands_get_the_address_of_the_master_node_once_all_nodes_are_up(box: MakeBox) -> None:
    job = box("echo $DSTACK_MASTER_NODE_IP $DSTACK_GPUS_NUM", nodes=2)
    job.api.action = {"action": "go", "nodes": {"master_ip": "10.0.0.7", "gpus_total": 16}}
    job.launch()
    job.end()
    assert job.api.log == b"10.0.0.7 16\n"


def test_a_job_inherits_no_file_no_ignored_signal_and_no_input(box: MakeBox) -> None:
    job = box("ls /proc/$$/fd", "grep -E '^Sig(Blk|Ign)' /proc/self/status", "cat")
    leak = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(leak, True)
    with job.start(before="signal.signal(signal.SIGINT, signal.SIG_IGN)", close_fds=False) as process:
        job.give_orders(process)
    os.close(leak)
    assert job.end()["exit_code"] == 0
    *files, blocked, ignored = job.lines()
    assert files == ["0", "1", "2"]
    # Signals from 32 on are the C library's own, and may come ignored from whoever started the tests.
    assert [int(line.split()[1], 16) & 0x7FFFFFFF for line in (blocked, ignored)] == [0, 0]


def test_a_runner_holds_nothing_but_its_lock_log_and_connection(box: MakeBox) -> None:
    job = box("for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.02; done", "echo up", "sleep 60")
    job.launch()
    job.wait_for("up")
    beats = job.api.count("heartbeat")
    eventually(lambda: job.api.count("heartbeat") > beats + 2, every=0.02)
    files = [os.readlink(f"/proc/{job.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{job.pid}/fd")]
    kinds = sorted(Path(file).name.partition(":")[0] for file in files)
    assert kinds == ["lock", "null", "pipe", "pipe", "runner.log", "runner.log", "socket"]


def test_the_host_s_snippet_prepares_the_environment_and_stays_out_of_the_log(box: MakeBox) -> None:
    snippet = "export CACHE=/scratch LR=host; two_lines='a\nb'; export two_lines; echo chatter; false"
    job = box('echo "$CACHE $LR"', 'echo "$two_lines"', setup=snippet, env={"LR": "run"})
    job.launch()
    assert job.end()["exit_code"] == 0
    assert job.lines() == ["/scratch run", "a", "b"]


def test_a_setup_snippet_that_leaves_too_much_fails_the_job(box: MakeBox) -> None:
    job = box("echo never", setup="head -c 2000000 /dev/zero >&3")
    job.launch()
    assert job.end()["message"] == "the host's set-up snippet leaves an environment of more than 1 MiB"


def test_a_setup_snippet_that_writes_without_end_is_ended(box: MakeBox) -> None:
    job = box("echo never", setup="cat /dev/zero")
    job.launch()
    assert job.end()["message"] == "the host's set-up snippet writes more than 16 MiB"
    assert job.processes() == set()


def test_a_failing_setup_snippet_fails_the_job_before_its_commands(box: MakeBox) -> None:
    job = box("echo never", setup="sleep 60 & echo 'no such module: cuda' >&2; exit 4")
    job.launch()
    end = job.end()
    assert (end["exit_code"], end["reason"]) == (None, "not_claimed"), "the snippet is the host's, not the run's"
    assert end["message"] == "the host's set-up snippet failed with 4: no such module: cuda"
    assert job.api.log == b""
    assert job.processes() == set()


def test_commands_run_in_the_runs_directory_or_in_working_dir(box: MakeBox) -> None:
    job = box("pwd", "mkdir -p below")
    job.launch()
    job.end()
    job.api.spec |= {"working_dir": "below"}
    again = box("pwd", working_dir="below", run_uid=job.api.spec["run_uid"])
    again.launch()
    again.end()
    assert job.lines() + again.lines() == [str(job.run_dir), str(job.run_dir / "below")]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"working_dir": "nowhere"}, "working_dir 'nowhere' does not exist on this host"),
        ({"working_dir": "/dev/null"}, "working_dir '/dev/null' can't be entered"),
        ({"shell": "/no/such/shell"}, "/no/such/shell can't be started"),
        ({"env": {"NUL": "a\0b"}}, "/bin/sh can't be started"),
        ({"env": {"LONG": "x" * 200_000}}, "Argument list too long"),
    ],
)
def test_a_command_that_cannot_start_ends_with_a_message(box: MakeBox, spec: dict[str, Any], message: str) -> None:
    job = box("echo never", **spec)
    job.launch()
    end = job.end()
    assert (end["exit_code"], end["reason"], end["log_size"]) == (None, "executor_error", 0)
    assert message in end["message"]
    assert job.api.count("started") == 0


def test_commands_may_be_longer_than_an_argument(box: MakeBox) -> None:
    job = box(": " + "x" * 140_000, "echo long; false", "echo never")
    job.run_dir.mkdir(parents=True)
    (job.run_dir / ".dstackweb-commands.sh").symlink_to(job.run_dir / "elsewhere")
    job.launch()
    assert job.end()["exit_code"] == 1
    assert job.lines() == ["long"]
    assert not (job.run_dir / "elsewhere").exists()


@as_root
def test_a_job_has_only_the_rights_of_its_user(box: MakeBox, open_home: Path) -> None:
    """A directory that its user can't reach isn't entered with root's rights, not through a link either."""
    closed = open_home / "closed"
    (closed / "open").mkdir(parents=True)
    closed.chmod(0o700)
    job = box("id -u; id -g; id -G; touch mine; ls -ln mine | cut -d' ' -f3", f"ln -s {closed}/open link")
    job.launch()
    job.end()
    nobody = pwd.getpwnam("nobody")
    groups = " ".join(map(str, os.getgrouplist(nobody.pw_name, nobody.pw_gid)))
    assert job.lines() == [str(nobody.pw_uid), str(nobody.pw_gid), groups, str(nobody.pw_uid)]
    for folder in (str(closed / "open"), "link"):
        inside = box("echo inside", working_dir=folder, run_uid=job.api.spec["run_uid"])
        inside.launch()
        assert "Permission denied" in inside.end()["message"]


@as_root
def test_files_that_a_job_links_to_are_never_given_to_the_job_user(box: MakeBox, open_home: Path) -> None:
    """An attempt leaves links to root's files; the next attempt, with its code, changes nothing about them."""
    kept = open_home / "kept"
    kept.write_text("root's")
    kept.chmod(0o600)
    first = box(f"ln -s {kept} train.py; ln -s {open_home} folder")
    first.launch()
    first.end()
    second = box("cat train.py", run_uid=first.api.spec["run_uid"])
    second.api.ship(packed({"train.py": b"print()"}))
    second.launch()
    assert second.end()["exit_code"] == 0
    assert second.lines() == ["print()"]
    assert (kept.read_text(), kept.stat().st_uid, open_home.stat().st_uid) == ("root's", 0, 0)


def test_an_unknown_user_is_refused(box: MakeBox) -> None:
    job = box("echo never")
    job.orders["user"] = "no-such-user"
    job.launch()
    end = job.end()
    assert (end["reason"], end["message"]) == ("not_claimed", "this host has no user 'no-such-user' to run jobs as")


READ_PARENT = "exec 2>&1; set +e; cat /proc/$PPID/mem; cat /proc/$PPID/environ; ls /proc/$PPID/fd"


def launch_as_other_user(job: Box) -> None:
    """Start a runner that is not root, and whose jobs are the same user's."""
    job.orders["user"] = None
    uid = os.getuid() or pwd.getpwnam("nobody").pw_uid
    umask = os.umask(0o022)  # its user goes through the folders above
    for folder in (job.state, job.run_dir):
        folder.mkdir(parents=True)
        os.chown(folder, uid, -1)
    os.umask(umask)
    # What a change of user protects by itself is undone first.
    as_other = f"os.setuid({uid}); import ctypes; ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)"
    loaded = "import dstackweb.runner.__main__, dstackweb.runner.loop, encodings.idna, traceback"
    with job.start(before=f"{loaded}; {as_other}") as process:
        job.give_orders(process)


def test_a_job_of_the_same_user_cannot_read_the_memory_of_its_runner(box: MakeBox, open_home: Path) -> None:
    """The token lives in the runner's memory alone."""
    job = box(READ_PARENT, "cat /proc/$$/environ | tr '\\0' '\\n' | grep ^LANG")
    launch_as_other_user(job)
    assert job.end()["exit_code"] == 0
    *denied, own = job.lines()
    assert [line.rpartition(": ")[2] for line in denied] == ["Permission denied"] * 3
    assert own == "LANG=C.UTF-8"


def test_a_job_of_the_same_user_that_asks_for_memory_starts_and_is_killed_first_when_there_is_none(
    box: MakeBox, open_home: Path
) -> None:
    wait = "until grep -qx 750 /proc/$$/oom_score_adj; do sleep 0.01; done"
    job = box(wait, "echo first", memory_mib=2000, host_memory_mib=8000)
    launch_as_other_user(job)
    end = job.end()
    assert (end.get("exit_code"), job.lines()) == (0, ["first"]), end


def packed(files: dict[str, bytes], *more: tarfile.TarInfo) -> bytes:
    """A tar.gz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(content))
        for member in more:
            tar.addfile(member)
    return buffer.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    """A link as a member of an archive."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_shipped_code_is_unpacked_before_the_commands_and_replaces_older_files(box: MakeBox) -> None:
    job = box("./src/run.sh", "cat latest", "cat twin", "chmod 400 src/run.sh; rm latest; mkdir latest; rmdir latest")
    job.api.ship(packed({"src/run.sh": b"#!/bin/sh\necho shipped\n", "a.txt": b"text\n"},
                        link("latest", "src/../a.txt"), link("twin", "a.txt", tarfile.LNKTYPE)))  # fmt: skip
    job.launch()
    assert job.end()["exit_code"] == 0
    again = box("cat src/run.sh twin", run_uid=job.api.spec["run_uid"])
    again.api.ship(packed({"src/run.sh": b"new\n"}))
    again.launch()
    assert again.end()["exit_code"] == 0
    assert job.lines() + again.lines() == ["shipped", "text", "text", "new", "text"]


def test_with_a_bad_archive_nothing_runs(box: MakeBox) -> None:
    job = box("echo never")
    job.api.ship(packed({}, link("up", "..")))
    job.launch()
    end = job.end()
    assert (end["reason"], end["exit_code"], end["log_size"]) == ("code_refused", None, 0)
    assert end["code_refused"] == {"fault": "link_outside", "name": "up", "limit": None}
    assert list(job.run_dir.iterdir()) == []
    assert not (job.state / "archive.tar.gz").exists()


def test_code_that_differs_from_the_upload_is_refused(box: MakeBox) -> None:
    job = box("echo never")
    job.api.ship(packed({"a": b"a"}))
    job.api.archive = packed({"a": b"b"})
    job.launch()
    assert job.end()["message"] == "the downloaded code differs from the uploaded code"


def test_a_download_that_breaks_off_is_tried_again(box: MakeBox) -> None:
    job = box("cat a")
    job.api.ship(packed({"a": b"whole\n"}))
    half = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(job.api.archive) + job.api.archive[:40]
    troubles = {"archive": [half, half]}
    job.api.trouble = lambda what: troubles[what].pop() if troubles.get(what) else None
    job.launch()
    job.end(nudged=True)
    assert job.lines() == ["whole"]


def test_the_token_crosses_no_network_in_plain(box: MakeBox) -> None:
    job = box("echo never")
    job.orders["api"] = "http://gpus.example.org"
    answer = job.launch()
    assert "plain HTTP is for this machine only" in answer["error"]
    eventually(lambda: not job.lives())  # it answers before it has exited
