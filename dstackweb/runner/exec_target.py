"""Where a job's commands run, as their user, for what else is started there: shells of people, connections to ports."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dstackweb.runner import container, enter, namespaces, sandbox, tree
from dstackweb.runner.child import CannotStart, Job, becoming
from dstackweb.runner.container import Container
from dstackweb.runner.engine import EngineError
from dstackweb.runner.state import PROGRAM

SHELL = "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"
COMMAND = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$0"; else exec sh -c "$0"; fi'
SFTP = """\
for found in /usr/lib/openssh/sftp-server /usr/lib/ssh/sftp-server /usr/libexec/openssh/sftp-server \
/usr/libexec/sftp-server /usr/lib/sftp-server; do
  [ -x "$found" ] && exec "$found"
done
echo "files can't be copied: there is no sftp-server here; install openssh-sftp-server, or use scp -O" >&2
exit 127"""
IDE_SOCKET = ".dstackweb-ide.sock"
"""In the run's directory: a port of the machine would be open to all of its users."""
NOT_RUNNING = "the job's commands are not running"
DIALER_S = 10.0
"""How long what makes connections may take to start and to answer."""


class ExecTarget:
    """One job, as what shells and connections lead to.

    `first` finds the first process of its commands; `state` is its runner's folder.
    """

    def __init__(self, job: Job, first: Callable[[], int], state: str) -> None:
        self._job, self._first = job, first
        self._container = container.read(state)
        self._user_inside: int | None = None

    def shell(self, command: str | None, *, tty: bool, sftp: bool, term: str, streams: Sequence[int]) -> int:
        """Start a shell, or a command in one, with `streams` as input, output and errors; returns its pid.

        Raises CannotStart, OSError.
        """
        argv = ["/bin/sh", "-c", SFTP if sftp else SHELL if command is None else COMMAND]
        if command is not None:
            argv.append(command)
        env = {"TERM": term} if tty else {}
        if self._container is not None:
            return self._in_container(self._container, argv, env, tty=tty, streams=streams)
        orders = {"argv": argv, "env": self._job.env | env, "working_dir": self._job.folder, "tty": tty}
        return self._start(orders, streams)

    def _in_container(
        self, of: Container, argv: Sequence[str], env: dict[str, str], *, tty: bool, streams: Sequence[int]
    ) -> int:
        engine = of.engine
        words = [engine.program, "exec", "--interactive", *(["--tty"] if tty else [])]
        words += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        orders = {
            "argv": [*words, of.name, *argv], "env": engine.environment() | {tree.MARKER: of.job},
            "working_dir": "/", "tty": tty, "uid": os.getuid(), "gid": os.getgid(),
        }  # fmt: skip
        return self._popen(orders, streams)

    def _start(self, orders: dict[str, Any], streams: Sequence[int]) -> int:
        """Start what becomes the job's user in the place of its commands."""
        account = self._job.account
        orders |= {"uid": account.pw_uid, "gid": account.pw_gid}
        if self._job.switches_user:
            orders["groups"] = os.getgrouplist(account.pw_name, account.pw_gid)
        if not self._has_namespaces():
            return self._popen(orders, streams)
        with contextlib.ExitStack() as stack:
            try:
                inside = namespaces.opened(self._first_inside(), "pid", "net", "ipc", "mnt")
                processes, *others = stack.enter_context(inside)
                stack.enter_context(namespaces.children_in(processes))
            except (ProcessLookupError, FileNotFoundError):
                raise CannotStart(NOT_RUNNING) from None
            return self._popen({**orders, "namespaces": others}, streams, others)

    def _has_namespaces(self) -> bool:
        """Whether the commands have namespaces of their own that matter, and can be joined by root alone."""
        if self._container is None:
            return self._job.writable is not None
        return os.getuid() == 0 or self._container.engine.network != "host"

    def _first_inside(self) -> int:
        """The first process in the container or the sandbox. Raises CannotStart, ProcessLookupError."""
        if self._container is not None:
            try:
                return int(self._container.state().get("Pid", 0))
            except EngineError as error:
                raise CannotStart(str(error)) from None
        own = _namespace(os.getpid())
        inside = [pid for pid in tree.below({self._first()}) if _namespace(pid) not in (own, "")]
        return min(inside, key=lambda pid: (int(tree.born(pid) or 0), pid), default=0)

    def _popen(self, orders: dict[str, Any], streams: Sequence[int], others: Sequence[int] = ()) -> int:
        """Start `enter` with these orders, from the runner's own files, and with `others` as further descriptors."""
        number = enter.stored(orders)
        source, sink, errors = streams
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", sandbox.ENTER, PROGRAM, str(number)],
                env={**sandbox.ENV, tree.MARKER: self._job.spec["job"]}, stdin=source, stdout=sink, stderr=errors,
                cwd="/", pass_fds=[number, *others], start_new_session=True, umask=0o022,
                preexec_fn=becoming(self._job, by_enter=True),
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise CannotStart(str(error)) from error
        finally:
            os.close(number)
        child.returncode = 0  # the runner's loop reaps it, together with orphans
        return child.pid

    def dialer(self) -> socket.socket:
        """Start a process of which connections are asked here (`dial.ask`). Raises CannotStart, OSError."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            mine.settimeout(DIALER_S)
            with open(os.devnull, "r+b", buffering=0) as null:
                orders = {"argv": ["dial"], "env": {}, "working_dir": self._job.run_dir, "dial": True}
                self._start(orders, (its.fileno(), null.fileno(), null.fileno()))
        except BaseException:
            mine.close()
            raise
        finally:
            its.close()
        return mine

    def port_user(self) -> int | None:
        """The uid, as this machine has it, whose processes are to listen on the job's ports; None: they are its alone.

        Raises CannotStart.
        """
        if self._container is None:
            return self._job.account.pw_uid
        if self._container.engine.network != "host":
            return None
        if self._user_inside is None:
            try:
                self._user_inside = tree.uid_of(int(self._container.state().get("Pid", 0)))
            except EngineError as error:
                raise CannotStart(str(error)) from None
            if self._user_inside is None:
                raise CannotStart(NOT_RUNNING)
        return self._user_inside


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
