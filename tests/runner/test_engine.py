"""A container engine that is away, or answers and makes no container: its host's fault, and not that of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner import engine as engines
from dstackweb.runner.engine import FAILED_FOR_S, Engine, Finder, note_failed
from tests.runner.conftest import Box

DAEMON_AWAY = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
PROGRAM = f"""#!/bin/sh
here=$(dirname "$0")
if [ -e "$here/away" ]; then echo "{DAEMON_AWAY}" >&2; exit 1; fi
if [ "$1" = create ]; then
  for image; do :; done
  if [ -e "$here/broken" ]; then echo "Error: mkdir /var/lib/docker/overlay2/x: no space left on device" >&2; exit 1; fi
  case "$*" in *"/bad"*) echo "Error: invalid workdir /bad" >&2; exit 1;; esac
fi
case "$1" in
  version) echo '{{"Server": {{"Version": "28.0"}}}}';;
  image) echo '[{{"Id": "sha256:1", "RepoTags": ["docker.io/library/tool:1"]}}]';;
  import | create) cat > /dev/null; echo sha256:2;;
  pull) touch "$here/away"; echo "{DAEMON_AWAY}" >&2; exit 1;;
esac
"""


class StandIn:
    """The command `docker`; a file in its folder says what is wrong with its daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = Engine("docker", str(folder / "docker"))
        (folder / "docker").write_text(PROGRAM)
        (folder / "docker").chmod(0o755)

    def becomes(self, state: str) -> None:
        (self.folder / state).touch()

    def recovers(self) -> None:
        for state in ("away", "broken"):
            (self.folder / state).unlink(missing_ok=True)


@pytest.fixture
def standin(open_home: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    folder = open_home / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return StandIn(folder)


@pytest.fixture
def contained(standin: StandIn, box: Callable[..., Box]) -> Callable[..., Box]:
    def make(**spec: Any) -> Box:
        defaults = {"image": "tool:1", "pull_policy": "missing", "registry_auth": None, "entrypoint": None}
        job = box("echo never", **{**defaults, **spec})
        job.orders |= {"engine": standin.engine.stored()}
        return job

    return make


def ended(job: Box) -> dict[str, Any]:
    job.launch()
    return job.end()


def failure_noted(job: Box) -> bool:
    return (job.state.parents[1] / engines.FAILED_FILE).exists()


@pytest.mark.parametrize(
    ("state", "spec", "message"),
    [
        ("away", {}, DAEMON_AWAY),
        ("fine", {"pull_policy": "always"}, DAEMON_AWAY),
        ("broken", {}, "no space left on device"),
        ("none", {}, "this host has no container engine now"),
    ],
    ids=["the daemon is away", "it dies while an image is pulled", "it makes no container", "there is none any more"],
)
def test_a_broken_engine_is_the_hosts_fault(
    contained: Callable[..., Box], standin: StandIn, state: str, spec: dict[str, Any], message: str
) -> None:
    job = contained(**spec)
    standin.becomes(state)
    if state == "none":
        job.orders["engine"] = None
    end = ended(job)
    assert (end["reason"], end["by_engine"], message in end["message"]) == ("not_claimed", True, True), end
    assert failure_noted(job)
    assert job.api.count("started") == 0


def test_a_container_that_the_engine_refuses_alone_is_the_runs_fault(contained: Callable[..., Box]) -> None:
    job = contained(working_dir="/bad")
    end = ended(job)
    assert (end["reason"], end["message"]) == ("creating_container_error", "Error: invalid workdir /bad")
    assert not failure_noted(job), "no run can hold the containers of a host back"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(engines.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("state", ["away", "broken"])
def test_a_host_has_no_engine_from_a_failure_on_until_a_try_works(
    standin: StandIn, tmp_path: Path, clock: list[float], state: str
) -> None:
    finder = Finder(str(tmp_path), "docker")
    engine, seen = finder.current()
    assert engine == finder.usable() == Engine("docker", standin.engine.program)
    assert finder.report(seen) == seen
    standin.becomes(state)
    assert finder.usable() is not None, "nothing has told it"
    note_failed(str(tmp_path), "no space")
    assert (finder.usable(), finder.report(seen)["code"], finder.report(seen)["error"]) == (None, "failed", "no space")
    engine, report = finder.current()
    assert (engine, report["code"]) == (None, "failed")
    standin.recovers()
    assert finder.current() == (None, report), "it is not asked all the time"
    clock[0] += FAILED_FOR_S
    assert finder.current() == (standin.engine, seen)
    assert finder.usable() == standin.engine
    assert finder.report(seen) == seen


def test_an_engine_that_was_switched_off_reports_nothing(tmp_path: Path) -> None:
    note_failed(str(tmp_path), "no space")
    finder = Finder(str(tmp_path), "none")
    assert finder.report(finder.current()[1]) == {}
