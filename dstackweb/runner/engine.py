"""The container engine of a machine, Docker or Podman: found and used by its command, and installed on cloud instances.

The command gets an environment of its own, never a job's: variables such as `DOCKER_HOST` or `LD_PRELOAD` would turn
it, which may do anything on the machine, to the job's ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from dstackweb.runner.state import say

CALL_S = 60.0
FOUND_FOR_S, AWAY_FOR_S, FAILED_FOR_S = 300.0, 30.0, 10.0
"""Time for which a host believes that its engine is there, away, or still as broken as a job has found it."""
FAILED_FILE = "engine-failed"
"""File in the home of a host's jobs with the engine's answer to a job, until the engine makes a container."""
NAMES = ("docker", "podman")
EMPTY_TAR = bytes(10_240)
_AWAY = ("cannot connect to the docker daemon", "error during connect", "is the docker daemon running",
         "connection refused", "unexpected eof", "connection reset by peer", "broken pipe")  # fmt: skip
_FORBIDDEN = ("permission denied while trying to connect", "got permission denied")
INSTALL_S, START_S = 600.0, 60.0
"""How long the installation may take, and then the daemon to answer."""
LOG = "engine.log"
TEXT, ERROR = 600, 300
GPU_TOOLS = {"docker": "nvidia-container-runtime-hook", "podman": "nvidia-ctk"}
"""What NVIDIA's container toolkit brings: without it the engine gives containers no GPUs."""
INSTALL = r"""
export DEBIAN_FRONTEND=noninteractive
wait=DPkg::Lock::Timeout=300 # updates at boot hold it
if command -v docker >/dev/null; then
  :
elif command -v apt-get >/dev/null; then
  apt-get -o $wait -q update
  apt-get -o $wait -qy --no-install-recommends install docker.io || exit
elif command -v dnf >/dev/null; then
  dnf -qy install docker || dnf -qy install podman || exit
elif command -v yum >/dev/null; then
  yum -qy install docker || exit
else
  echo 'no apt-get, dnf or yum' >&2
  exit 1
fi
systemctl start docker || service docker start || :
"""


class EngineError(Exception):
    """The engine refused a call; the message is its own."""


class EngineAway(EngineError):
    """The engine gave no answer: what it runs is unknown."""


@dataclass(frozen=True)
class Engine:
    """One engine. `volumes` are the host's folders that jobs may mount, with `:rw` where they may write.

    `socket` is where Docker's daemon listens, empty for its default.
    """

    name: str
    program: str
    socket: str = ""
    network: str = "host"
    volumes: tuple[str, ...] = ()

    @classmethod
    def of(cls, orders: Mapping[str, Any]) -> Engine:
        """From a runner's orders, or what `stored` made."""
        return cls(orders["name"], orders["program"], orders["socket"], orders["network"], tuple(orders["volumes"]))

    def stored(self) -> dict[str, Any]:
        return asdict(self) | {"volumes": list(self.volumes)}

    def environment(self, config: str = "/nonexistent") -> dict[str, str]:
        """Of its command. `config`: the folder with the credentials for registries."""
        env = {"PATH": os.defpath, "LANG": "C.UTF-8", "DOCKER_CONFIG": config}
        if self.name == "podman":
            env |= {"HOME": "/root", "REGISTRY_AUTH_FILE": os.path.join(config, "config.json")}
        return env | ({"DOCKER_HOST": self.socket} if self.socket else {})

    def try_out(self) -> None:
        """Make a container of an empty image, and remove both. Raises EngineAway, EngineError if that fails."""
        image = self._make("import", "-", stdin=EMPTY_TAR)
        try:
            made = self._make("create", "--network", self.network, image, "/none")
            self.call("rm", "--force", made)
        finally:
            with contextlib.suppress(EngineError):  # a trial at the same time may have removed it
                self.call("rmi", "--force", image)

    def _make(self, *arguments: str, stdin: bytes = b"") -> str:
        """The id that the command prints last of what it has made."""
        words = self.call(*arguments, stdin=stdin).split()
        if not words:
            raise EngineError(f"{self.name} {arguments[0]} printed nothing")
        return words[-1]

    def call(self, *arguments: str, timeout_s: float = CALL_S, pass_fds: Sequence[int] = (), stdin: bytes = b"") -> str:
        """Return what the engine's command prints. Raises EngineAway, EngineError."""
        try:
            done = subprocess.run(
                [self.program, *arguments], env=self.environment(), pass_fds=pass_fds, input=stdin,
                capture_output=True, timeout=timeout_s, check=False, cwd="/",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise EngineAway(f"{self.name} gave no answer within {timeout_s:.0f} s") from None
        except (OSError, ValueError) as error:
            raise EngineAway(f"{self.program} can't be started: {error}") from None
        if done.returncode:
            raise error_of(self.name, done.stderr.decode(errors="replace"), done.returncode)
        return done.stdout.decode(errors="replace")


def error_of(name: str, text: str, code: int) -> EngineError:
    found = text.strip()[-1000:] or f"{name} failed with {code}"
    return EngineAway(found) if any(words in found.lower() for words in _AWAY) else EngineError(found)


def find(
    wanted: str = "", *, network: str = "host", volumes: Sequence[str] = ()
) -> tuple[Engine | None, dict[str, Any]]:
    """This machine's engine if it can be used, and what hosts report of it (`name`, `version`, `code`, `error`).

    `wanted` is an engine's name, "none", or empty for the first that works.
    """
    if wanted == "none":
        return None, {}
    failed: dict[str, Any] | None = None
    for name in [wanted] if wanted else NAMES:
        program = shutil.which(name)
        if program is None:
            continue
        engine = Engine(name, program, os.environ.get("DOCKER_HOST", ""), network, tuple(volumes))
        try:
            version = _version(engine)
        except EngineError as error:
            failed = failed or _report(name, code=_code(error), error=str(error)[-ERROR:])
        else:
            return engine, _report(name, version=version, volumes=list(volumes))
    return None, failed or _report(wanted, code="not_found")


def _report(
    name: str, *, version: str = "", code: str = "", error: str = "", volumes: Sequence[str] = ()
) -> dict[str, Any]:
    return {"name": name, "version": version, "code": code, "error": error, "volumes": list(volumes)}


def _version(engine: Engine) -> str:
    """That of the part that runs containers. Raises EngineAway, EngineError."""
    found = json.loads(engine.call("version", "--format", "{{json .}}", timeout_s=10.0))
    return str((found.get("Server") or found.get("Client") or {}).get("Version", ""))[:40]


def _code(error: EngineError) -> str:
    if any(words in str(error).lower() for words in _FORBIDDEN):
        return "not_permitted"
    return "away" if isinstance(error, EngineAway) else "failed"


def note_failed(home: str, error: str) -> None:
    """Have the host of these jobs place no more containers until a try works."""
    with contextlib.suppress(OSError), open(os.path.join(home, FAILED_FILE), "w", encoding="utf-8") as file:
        file.write(error)


class Finder:
    """Finds the engine again every few minutes: a start does not ask for it.

    Once a job of `home` has noted that the engine failed, the host has none until it makes a container again.
    """

    def __init__(self, home: str, wanted: str = "", *, network: str = "host", volumes: Sequence[str] = ()) -> None:
        self._failed_file = os.path.join(home, FAILED_FILE)
        self._asked = (wanted, network, tuple(volumes))
        self._found: tuple[Engine | None, dict[str, Any]] = (None, {})
        self._until = 0.0

    def current(self) -> tuple[Engine | None, dict[str, Any]]:
        """As `find`, of some minutes ago at most."""
        has_failed = self._failure() is not None
        if time.monotonic() < self._until and not (has_failed and self._found[0]):
            return self._found
        if has_failed:  # meanwhile, others don't wait for the trial
            self._found, self._until = (None, self.report(self._found[1])), time.monotonic() + FAILED_FOR_S
        wanted, network, volumes = self._asked
        engine, report = find(wanted, network=network, volumes=volumes)
        if engine is not None and has_failed:
            try:
                engine.try_out()
            except EngineError as error:
                report = _report(engine.name, code=_code(error), error=str(error)[-ERROR:])
                engine = None
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._failed_file)
        if has_failed and report.get("code") == "away":
            report["code"] = "failed"  # a job needed it: other machines never have its daemon running
        self._found = engine, report
        self._until = time.monotonic() + (FOUND_FOR_S if engine else FAILED_FOR_S if has_failed else AWAY_FOR_S)
        return self._found

    def usable(self) -> Engine | None:
        """The engine for a start, which waits for no trial."""
        return self.current()[0] if self._failure() is None else None

    def report(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the host's report of its engine: as `seen` lately, unless a job has found since that it fails."""
        failure = self._failure()
        if failure is None or not seen or seen.get("code"):
            return dict(seen)
        return {**seen, "version": "", "code": "failed", "error": failure[-ERROR:], "volumes": []}

    def _failure(self) -> str | None:
        try:
            with open(self._failed_file, encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            return str(error)


class EngineFault(str, Enum):  # noqa: UP042 - Python 3.9 has no StrEnum
    """Why an instance has no engine for a job."""

    INSTALL_FAILED = "install_failed"
    NOT_ROOT = "not_root"
    NO_GPU_TOOLKIT = "no_gpu_toolkit"


class EngineSetup:
    """The engine of a cloud instance: that of its image, or the distribution's Docker, installed once and at need.

    It is installed for the first job with an image: instances that were started for other jobs can serve it, too.
    `home` gets the installation's output.
    """

    def __init__(self, home: str) -> None:
        self._log = os.path.join(home, LOG)
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0
        self._ended = False
        self.report: dict[str, Any] | None = None
        """For the server: the `job` that waits, and the `fault` with the installer's `text` if there is one."""

    def prepare(self, orders: Mapping[str, Any]) -> dict[str, Any] | None:
        """The job's orders with its engine; None while there is none, or if there will be none (`report`)."""
        if not orders.get("image"):
            self.report = None
            return dict(orders)
        found = self._find()
        fault = text = ""
        if isinstance(found, Engine):
            if not orders.get("gpus") or shutil.which(GPU_TOOLS[found.name]):
                self.report = None
                return {**orders, "engine": found.stored()}
            fault = EngineFault.NO_GPU_TOOLKIT.value
        elif found is not None:
            fault, text = found.value, self._output()
        self.report = {"job": orders["job"], "fault": fault, "text": text}
        return None

    def _find(self) -> Engine | EngineFault | None:
        """None while it is being installed, or its daemon starts."""
        if self._process is None or self._has_ended(self._process):
            found, _report = find()
            if found is not None:
                return found
        if self._process is None:
            return self._install()
        if time.monotonic() < self._until and (not self._ended or self._process.returncode == 0):
            return None
        if not self._ended:
            self._process.kill()
        return EngineFault.INSTALL_FAILED

    def _install(self) -> EngineFault | None:
        if os.getuid() != 0:
            return EngineFault.NOT_ROOT
        say("this instance has no container engine that answers; installing and starting one")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", INSTALL], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        self._until = time.monotonic() + INSTALL_S
        return None

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        if not self._ended and process.poll() is not None:
            self._ended, self._until = True, time.monotonic() + START_S
            say(f"the installation of the container engine ended with {process.returncode}")
        return self._ended

    def _output(self) -> str:
        try:
            with open(self._log, encoding="utf-8", errors="replace") as file:
                return file.read().strip()[-TEXT:]
        except OSError:
            return ""
