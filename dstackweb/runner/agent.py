"""`runner.pyz agent`: the one process that a cloud's machine is there for. It has the jobs' runners started, tells when
the cloud takes the machine back, and switches it off when it is told to, or when nobody tells it anything any more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from dstackweb.runner import machine, tree
from dstackweb.runner.backoff import backoff
from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.log import say
from dstackweb.runner.state import State
from dstackweb.runner.work import NotStarted, Work

LOOK_S = 0.5
METADATA_EVERY_S = 5.0
JOIN_S = 1800.0
"""How long nobody may answer before the machine is anybody's."""
ALONE_S = 3600.0
"""How long nobody may answer, until the server has said how long."""
UNTOLD_S = 6 * 3600.0
"""How much longer while the end of a job has not been told: it would be lost with the machine."""
STARTS_AT_ONCE, AGAIN_CAP_S = 3, 30.0
"""How often a runner that dies is followed at once by another; then ever later."""
TELLERS = 5
"""So many runners of a job may try to tell how it ended, before that is taken for lost."""
OFF, NEVER, NOT_YET = 0, 2, 1
"""What the agent ends with: the machine goes off; it can't be started with these arguments; anything else."""


class Agent:
    """What this process knows. The job's runner and the token outlive it; all else it is told again."""

    def __init__(self, client: Client, work: Work, metadata: machine.Metadata) -> None:
        self.client, self.work, self.metadata = client, work, metadata
        self.job = ""
        self.starts = 0
        self.error = ""
        self.interruption: str | None = None
        self.alone_s = ALONE_S
        self.contact = time.monotonic()
        self.failures = 0

    def run(self) -> None:
        """Until the machine is to be switched off."""
        self.job = self.work.at_hand()
        next_ask = next_metadata = 0.0
        had_runner = False
        while True:
            now = time.monotonic()
            if now >= next_metadata:
                next_metadata = now + METADATA_EVERY_S
                if self.interruption is None and (at := self.metadata.interruption()):
                    say(f"the cloud takes this machine back at {at}")
                    self.interruption, next_ask = at, 0.0
            has_runner = bool(self.job) and self.work.lives(self.job)
            if had_runner and not has_runner and self.starts < STARTS_AT_ONCE:
                next_ask = 0.0
            had_runner = has_runner
            if now >= next_ask:
                again_s = self._ask(has_runner)
                if again_s is None:
                    return
                next_ask = time.monotonic() + again_s
            if self._is_abandoned():
                say("nobody answers any more")
                return
            time.sleep(LOOK_S)

    def _ask(self, has_runner: bool) -> float | None:
        """Tell how things are and do what is to be done; seconds until the next time, None when it is to be off."""
        said = {
            "job": self.job if has_runner else None,
            "left": bool(self.job) and self._is_left(),
            "interruption": {"at": self.interruption} if self.interruption else None,
            "error": self.error,
        }
        try:
            answer = self.client.post("next", said)
        except (Unreachable, Refused) as error:
            # A refusal, too, may pass, such as that of a server with another key; it ends no job.
            self.failures += 1
            if self.failures in (1, 10):
                say(f"the API can't be asked, trying on: {error}")
            return backoff(self.failures)
        self.failures, self.contact = 0, time.monotonic()
        if answer.get("do") == "off":
            say("not needed any more")
            return None
        self.alone_s = float(answer.get("alone_s", self.alone_s))
        if answer.get("do") == "run":
            return self._start(answer)
        self.error = ""
        return float(answer.get("again_s", METADATA_EVERY_S))

    def _is_left(self) -> bool:
        """Whether there is something of the job for another runner to find."""
        return self.work.left(self.job) or (self.starts < TELLERS and self.work.has_end_to_tell(self.job))

    def _start(self, answer: dict[str, Any]) -> float:
        if self.job != answer["job"]:
            self.job, self.starts = answer["job"], 0
        self.starts += 1
        say(f"starting the runner of job {self.job}")
        try:
            self.work.start(answer["orders"])
            self.error = ""
        except NotStarted as error:
            self.error = str(error)
            say(f"it does not start: {error}")
        return min(AGAIN_CAP_S, 2.0 ** (self.starts - 1))

    def _is_abandoned(self) -> bool:
        """Whether nobody has answered for so long that nobody counts on this machine, and nothing here goes on."""
        silent_s = time.monotonic() - self.contact
        if silent_s <= self.alone_s or self.work.goes_on():
            return False
        return silent_s > self.alone_s + UNTOLD_S or not self.work.has_untold()


def main(arguments: list[str]) -> int:
    """Join unless that is done, and stay. Whoever started it starts it again unless it returns OFF."""
    parser = argparse.ArgumentParser(prog="agent", description=__doc__)
    parser.add_argument("--api", required=True, help="the server's URL")
    parser.add_argument("--instance", required=True, help="the ID of this machine")
    parser.add_argument("--home", required=True, help="where the agent keeps its files")
    parser.add_argument("--insecure", action="store_true", help="allow plain HTTP to another machine")
    options = parser.parse_args(arguments)
    _settle_down()
    state = State(options.home)
    try:
        state.make()
        if not state.lock():
            say("another agent is at work here")
            return NOT_YET
        join_token = os.environ.pop("DSTACKWEB_JOIN_TOKEN", "")
        caller = _caller(options)
        token = _kept_token(state) or _join(caller(join_token, state.nonce()), state, join_token, options.api)
    except OSError as error:
        say(f"can't begin: {error}")
        return NOT_YET
    except ValueError as error:
        say(str(error))
        return NEVER
    if token:
        work = Work(options.home, os.path.abspath(sys.argv[0]))
        Agent(caller(token, state.nonce()), work, machine.Metadata()).run()
    say("this machine switches off")
    return OFF if machine.switch_off() else NOT_YET


def _caller(options: argparse.Namespace) -> Callable[[str, str], Client]:
    def client(token: str, nonce: str) -> Client:
        return Client(options.api, f"instances/{options.instance}", token, nonce, insecure=options.insecure)

    return client


def _settle_down() -> None:
    """Away from the session it was started in, and closed to other processes of its user."""
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o022)
    tree.protect_memory()


def _kept_token(state: State) -> str:
    try:
        with open(state.path("token"), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _join(client: Client, state: State, join_token: str, api: str) -> str:
    """The token of this machine's own, kept for who comes after; empty when the machine is nobody's."""
    about = {"gpus": machine.gpus(), "address": machine.address(api)}
    until, failures = time.monotonic() + JOIN_S, 0
    while time.monotonic() < until:
        try:
            token = str(client.post("join", {"token": join_token, "nonce": state.nonce(), **about})["token"])
        except Unreachable as error:
            failures += 1
            if failures in (1, 10, 100):
                say(f"can't join yet, trying on: {error}")
            time.sleep(backoff(failures))
        except Refused as refused:
            say(f"may not join: {refused}")
            return ""
        else:
            state.write("token", token)
            say(f"joined with {len(about['gpus'])} GPUs")
            return token
    say("nobody answered")
    return ""
