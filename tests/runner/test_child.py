"""The script and its environment, in real shells."""

from __future__ import annotations

import getpass
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner.child import BOOT, Account, CannotStart, account, base_env, job_env, script, spawn
from dstackweb.runner.orders import Orders, Spec
from dstackweb.runner.tree import MARKER
from tests.support import REPO

SHELLS = ["/bin/sh", "/bin/bash"]


def orders(tmp_path: Path, user: str | None = None) -> Orders:
    return Orders("http://127.0.0.1", "the-job", "the-token", "/state", str(tmp_path), user, os.environ["PATH"])


def run(tmp_path: Path, *commands: str, **spec: Any) -> tuple[int, str]:
    """Exit code and output of commands as a runner starts them."""
    wanted, given = Spec(commands=list(commands), **spec), orders(tmp_path)
    process = subprocess.run(
        [wanted.shell, "-c", BOOT, "sh"],
        input=script(given, wanted),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=base_env(given, account(given)),
        timeout=5,
    )
    return process.returncode, process.stdout.decode(errors="replace")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("failing", "code"),
    [
        ("false", 1),
        ("exit 3", 3),
        ("(exit 4)", 4),
        ("false && true", 1),
        ("true\nfalse\necho never", 1),
        ("cd /no/such/folder && true", None),
        ("no-such-command", 127),
        ("kill -9 $$", -9),
        ("sh -c 'kill -9 $$'", 137),
    ],
)
def test_commands_stop_at_the_first_that_fails(tmp_path: Path, shell: str, failing: str, code: int | None) -> None:
    status, output = run(tmp_path, "echo before", failing, "echo never", shell=shell)
    assert status == code if code is not None else status not in (0, 125)
    assert output.startswith("before\n")
    assert "never" not in output


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "fine", ["false || true", "if false; then :; fi", "! true || true", "# a remark", "true \\", ""]
)
def test_failures_that_a_command_takes_care_of_itself_stop_nothing(tmp_path: Path, shell: str, fine: str) -> None:
    assert run(tmp_path, fine, "echo went on", shell=shell) == (0, "went on\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_an_unclosed_quote_is_its_own_commands_affair(tmp_path: Path, shell: str) -> None:
    status, output = run(tmp_path, "echo first", "echo 'oops", "echo never", shell=shell)
    assert status != 0
    assert output.startswith("first\n")
    assert "\nnever" not in output


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_share_one_shell_and_may_have_many_lines(tmp_path: Path, shell: str) -> None:
    commands = ("x=1; cd /; f() { echo $x $PWD; }", "cat <<EOF\nhere $x\nEOF", "f")
    assert run(tmp_path, *commands, shell=shell) == (0, "here 1\n1 /\n")


def test_commands_read_nothing_of_what_the_runner_sends(tmp_path: Path) -> None:
    assert run(tmp_path, "cat", "echo end") == (0, "end\n")


def test_a_script_that_broke_off_is_not_begun(tmp_path: Path) -> None:
    """The runner was killed while it sent the commands: nobody may have executed a part of them."""
    whole = script(orders(tmp_path), Spec(commands=["echo begun", "echo more"]))
    for end in (0, 10, len(whole) - 20, len(whole) - 1):
        done = subprocess.run(["/bin/sh", "-c", BOOT], input=whole[:end], capture_output=True)
        assert (done.returncode, done.stdout) == (125, b"")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_hosts_set_up_comes_first_and_the_runs_env_wins(tmp_path: Path, shell: str) -> None:
    setup = 'A=setup; B=setup; export A B; conda() { echo "conda $1"; }; PATH=/opt/x:$PATH'
    status, output = run(
        tmp_path, "echo $A $B; conda activate; echo $PATH", env={"A": 'run\'s "own" $x\n'}, setup=setup, shell=shell
    )
    assert status == 0
    assert output.startswith('run\'s "own" $x setup\nconda activate\n/opt/x:')


@pytest.mark.parametrize("shell", SHELLS)
def test_a_set_up_that_fails_ends_the_job_and_says_whose_it_is(tmp_path: Path, shell: str) -> None:
    assert run(tmp_path, "echo never", setup="echo loading; (exit 5)", shell=shell) == (
        5,
        "loading\ndstackweb: the host's set-up snippet failed\n",
    )


def test_a_failure_in_the_middle_of_the_set_up_is_its_own_affair(tmp_path: Path) -> None:
    assert run(tmp_path, "echo on", setup="false\ntrue") == (0, "on\n")


def test_the_environment_holds_the_jobs_own_and_nothing_of_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTACKWEB_SECRET_KEY", "the key")
    status, output = run(
        tmp_path, "env", run="train", run_uid="uid", nodes=4, node=2, master_ip="10.0.0.1", gpus_per_node=2,
        gpus_total=8, gpus=["GPU-a", "GPU-b"], tasks_url="http://t", tasks_token="tasks-only", env={"LR": "1e-4"},
    )  # fmt: skip
    assert status == 0
    env = dict(line.split("=", 1) for line in output.splitlines())
    shells_own = ("PWD", "OLDPWD", "_", "SHLVL")
    assert {name: value for name, value in env.items() if name not in shells_own} == {
        "HOME": pwd.getpwuid(os.getuid()).pw_dir, "USER": getpass.getuser(), "PATH": os.environ["PATH"],
        "LANG": os.environ.get("LANG") or "C.UTF-8", "PYTHONUNBUFFERED": "1", MARKER: "the-job", "LR": "1e-4",
        "DSTACK_RUN_NAME": "train", "DSTACK_RUN_ID": "uid", "DSTACK_JOB_ID": "the-job", "DSTACK_RUN_DIR": str(tmp_path),
        "DSTACK_NODES_NUM": "4", "DSTACK_NODE_RANK": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1",
        "DSTACK_GPUS_PER_NODE": "2", "DSTACK_GPUS_NUM": "8", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "DSTACKWEB_TASKS_URL": "http://t", "DSTACKWEB_TASKS_TOKEN": "tasks-only",
    }  # fmt: skip


def test_a_run_cant_give_itself_other_gpus(tmp_path: Path) -> None:
    env = job_env(orders(tmp_path), Spec(commands=[], env={"CUDA_VISIBLE_DEVICES": "GPU-other"}))
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_name_that_no_shell_takes_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"'a\.b'"):
        script(orders(tmp_path), Spec(commands=[], env={"a.b": "x"}))


def test_large_scripts_fit(tmp_path: Path) -> None:
    """Arguments end at 128 KiB; this comes on standard input."""
    text = "x" * 100_000
    assert run(tmp_path, f"a={text}", f"b={text}; echo ${{#a}} ${{#b}}", env={"C": text}) == (0, "100000 100000\n")


def test_the_working_directory_lies_in_the_runs_own(tmp_path: Path) -> None:
    (tmp_path / "sub dir").mkdir()
    assert run(tmp_path, "pwd", working_dir="sub dir") == (0, f"{tmp_path}/sub dir\n")
    assert run(tmp_path, "pwd", working_dir="/") == (0, "/\n")


def test_no_such_working_directory_or_shell_says_so(tmp_path: Path) -> None:
    given = orders(tmp_path)
    with pytest.raises(CannotStart, match="working_dir 'nowhere' does not exist"):
        spawn(given, Spec(commands=[], working_dir="nowhere"), account(given), 2)
    with pytest.raises(CannotStart, match="/bin/no-shell can't be started"):
        spawn(given, Spec(commands=[], shell="/bin/no-shell"), account(given), 2)


def test_a_user_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="'no-such-user'"):
        account(orders(tmp_path, user="no-such-user"))


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user first, which only root can")
def test_isolation_is_not_given_up_where_the_user_cant_be_become(tmp_path: Path) -> None:
    """A runner that isn't root must not run as itself what should run as another."""
    code = (
        "import os\n"
        "from dstackweb.runner.child import account, CannotStart\n"
        "from dstackweb.runner.orders import Orders\n"
        "os.setuid(65534)\n"
        "try: account(Orders('', '', '', '', '/', 'root'))\n"
        "except CannotStart as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert "only a runner started as root can become that user" in done.stdout


def test_home_is_the_runs_directory_where_the_user_has_none(tmp_path: Path) -> None:
    home = account(orders(tmp_path)).home
    assert Account("x", home, None).owner is None
    if os.getuid() == 0:
        assert account(orders(tmp_path, user="nobody")).home == str(tmp_path)
