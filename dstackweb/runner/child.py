"""The job's commands as one shell: who it runs as, its environment, its script."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import subprocess
from typing import Any, NamedTuple

from dstackweb.runner.orders import Orders, Spec
from dstackweb.runner.tree import MARKER

BOOT = """dstackweb_script=$(cat); case $dstackweb_script in *'#end') eval "$dstackweb_script";; *) exit 125;; esac"""
"""What the shell gets as its argument. The script itself comes on standard input: it holds values that nobody should
see in a list of processes, and it is sent once the process can be recognised as the job's. A script that broke off,
because the runner was killed while sending it, is not begun."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class CannotStart(Exception):
    """The commands can't be started here; the text says why."""


class Account(NamedTuple):
    """Who the commands run as. `switch` is None when that is the runner's own user."""

    name: str
    home: str
    switch: dict[str, Any] | None

    @property
    def owner(self) -> tuple[int, int] | None:
        """The (uid, gid) that the job's own files must have, when they are not the runner's."""
        return (self.switch["user"], self.switch["group"]) if self.switch else None


def account(orders: Orders) -> Account:
    """Raises CannotStart where the user is not known or can't be become: isolation is not given up silently."""
    try:
        user = pwd.getpwuid(os.geteuid()) if orders.user is None else pwd.getpwnam(orders.user)
    except KeyError:
        raise CannotStart(f"this host has no user {orders.user or os.geteuid()!r} to run jobs as") from None
    other = user.pw_uid != os.geteuid()
    if other and os.geteuid() != 0:
        raise CannotStart(f"jobs run as {user.pw_name} here, and only a runner started as root can become that user")
    home = user.pw_dir
    if not os.path.isdir(home) or (other and os.stat(home).st_uid != user.pw_uid):
        home = orders.run_dir
    groups = os.getgrouplist(user.pw_name, user.pw_gid) if other else []
    switch = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups} if other else None
    return Account(user.pw_name, home, switch)


def make_run_dir(path: str, who: Account) -> bool:
    """The run's own directory, kept across attempts: for its user alone, below folders that others can pass through.

    Returns whether it was there before.
    """
    there = os.path.isdir(path)
    if not there:
        umask = os.umask(0o066)
        try:
            os.makedirs(path)
        finally:
            os.umask(umask)
        os.chmod(path, 0o700)
    if who.owner is not None:
        os.chown(path, *who.owner)
    return there


def spawn(orders: Orders, spec: Spec, who: Account, output: int) -> subprocess.Popen[bytes]:
    """Start a shell that waits for its script, writing to the file descriptor `output`. Raises CannotStart."""
    folder = working_dir(orders, spec)
    if not os.path.isdir(folder):
        raise CannotStart(f"working_dir {spec.working_dir!r} does not exist here")
    try:
        return subprocess.Popen(
            [spec.shell, "-c", BOOT, os.path.basename(spec.shell)],
            env=base_env(orders, who),
            cwd=orders.run_dir,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            umask=0o022,
            **(who.switch or {}),
        )
    except (OSError, ValueError) as error:
        raise CannotStart(f"the shell {spec.shell} can't be started: {error}") from error


def send(process: subprocess.Popen[bytes], text: bytes) -> None:
    """Give the shell its script; it begins with the last byte. Whoever reaps orphans has to reap it too."""
    assert process.stdin is not None
    # A shell that has ended already takes nothing.
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(text)
    process.returncode = 0


def base_env(orders: Orders, who: Account) -> dict[str, str]:
    """What is there before the host's set-up snippet; nothing else of the server's environment.

    Output is to be seen while it is made, and Python would keep it back for as long as it isn't a terminal's.
    """
    return {
        "HOME": who.home,
        "USER": who.name,
        "PATH": orders.path,
        "LANG": os.environ.get("LANG") or "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        MARKER: orders.job,
    }


def job_env(orders: Orders, spec: Spec) -> dict[str, str]:
    """What comes after the set-up snippet: the run's own, then dstack's names for where a job stands."""
    env = {
        **spec.env,
        "DSTACK_RUN_NAME": spec.run,
        "DSTACK_RUN_ID": spec.run_uid,
        "DSTACK_JOB_ID": orders.job,
        "DSTACK_RUN_DIR": orders.run_dir,
        "DSTACK_NODES_NUM": str(spec.nodes),
        "DSTACK_NODE_RANK": str(spec.node),
        "DSTACK_MASTER_NODE_IP": spec.master_ip,
        "DSTACK_GPUS_PER_NODE": str(spec.gpus_per_node),
        "DSTACK_GPUS_NUM": str(spec.gpus_total),
        "CUDA_VISIBLE_DEVICES": ",".join(spec.gpus),
        MARKER: orders.job,
    }
    if spec.tasks_url:
        env |= {"DSTACKWEB_TASKS_URL": spec.tasks_url, "DSTACKWEB_TASKS_TOKEN": spec.tasks_token}
    return env


def working_dir(orders: Orders, spec: Spec) -> str:
    """Where the commands begin, below the run's directory unless it is an absolute path."""
    return os.path.join(orders.run_dir, spec.working_dir or "")


def script(orders: Orders, spec: Spec) -> bytes:
    """Set-up, environment, commands; it stops at the first that fails. Raises CannotStart for what no shell can take.

    Each command is an `eval` of its own, so that an unclosed quote stays its own affair. `set -e` then sees its status
    as a whole: `a && b` among the commands stops them when `a` fails, which it wouldn't by itself.
    """
    env = job_env(orders, spec)
    if wrong := [name for name in env if not NAME.fullmatch(name)]:
        raise CannotStart(f"env: {wrong[0]!r} is no name for a variable")
    lines = ["unset dstackweb_script", "exec </dev/null"]
    if spec.setup.strip():
        complaint = shlex.quote("dstackweb: the host's set-up snippet failed")
        lines.append(f"eval {shlex.quote(spec.setup)} || {{ set -- $?; echo {complaint} >&2; exit $1; }}")
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in env.items()]
    lines += [f"cd {shlex.quote(working_dir(orders, spec))} || exit", "set -e"]
    lines += [f"eval {shlex.quote(command)}" for command in spec.commands]
    return "\n".join([*lines, "#end"]).encode("utf-8", "surrogatepass")
