"""Calls of Slurm's commands, on this machine or over SSH."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from dstackweb.backends.clusters import EngineRefused
from dstackweb.backends.contract import SourceFailed, SourceFailure

TIMEOUT_S = 20.0
SSH_FAILED, NOT_FOUND = 255, 127
PASSED = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|TZ|LANG|LC_\w+|LD_LIBRARY_PATH|KRB5CCNAME|(SLURM|SBATCH|MUNGE)_?\w*)$"
)
"""Variables of the server that Slurm's commands get here, and with `sbatch` the jobs: none of its secrets."""
AWAY = re.compile(
    r"unable to contact|connection (refused|failure|timed out)|timed out|zero bytes|not resolve|controller.*(down|not)",
    re.IGNORECASE,
)
"""What Slurm's commands say where nothing was decided."""


@dataclass(frozen=True)
class Commands:
    """Slurm's commands on the PATH of this machine, or of `host` (`user@login.example`).

    SSH asks for no password: the server's user needs a key, or `key_file` is one, and must know the host.
    """

    host: str = ""
    key_file: str = ""

    def run(self, name: str, *arguments: str, text: str = "") -> str:
        """What a command prints; `text` is its input. Raises EngineRefused, or SourceFailed without an answer."""
        argv = ["env", "SLURM_TIME_FORMAT=%s", name, *arguments]
        try:
            done = subprocess.run(
                self._over_ssh(argv), input=text, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
                check=False, env=None if self.host else {k: v for k, v in os.environ.items() if PASSED.match(k)},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._unreachable(str(error)) from error
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        last = said[-1] if said else f"{name} ended with exit code {done.returncode}"
        if done.returncode == 0:
            return done.stdout
        failed = done.returncode < 0 or done.returncode == NOT_FOUND or (self.host and done.returncode == SSH_FAILED)
        if failed or AWAY.search("\n".join(said)):
            raise self._unreachable(last)
        raise EngineRefused(last)

    def _over_ssh(self, argv: Sequence[str]) -> list[str]:
        if not self.host:
            return list(argv)
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *(["-i", self.key_file] if self.key_file else [])]
        return ["ssh", *options, "--", self.host, shlex.join(argv)]

    def _unreachable(self, text: str) -> SourceFailed:
        return SourceFailed(SourceFailure.UNREACHABLE, endpoint=self.host or "Slurm", text=text[:300])
