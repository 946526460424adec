"""`make run` and each `make demo-…` of the README, as its reader uses them: a bare environment, a browser, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import httpx
import pytest

from standins.ray import Ray
from tests import databases
from tests.forms import body_of
from tests.support import REPO, eventually, make


class MadeServer:
    """`with MadeServer("demo-gpus", folder) as demo:` it serves, and the reader has signed in; at the end is Ctrl-C.

    `folder` is the reader's home. With `migrated` the server finds its tables made, which takes half of a first start.
    """

    def __init__(self, target: str, folder: Path, *, migrated: bool = False) -> None:
        self.target, self.output, self.home = target, folder / "output", folder / "home"
        self.url = f"http://127.0.0.1:{free_pair_of_ports()}"
        self.env = {
            "HOME": str(folder), "PATH": os.environ["PATH"],
            "DSTACKWEB_HOME": str(self.home), "DSTACKWEB_PORT": self.url.rpartition(":")[2],
        }  # fmt: skip
        self.browser = httpx.Client(base_url=self.url, follow_redirects=True, timeout=30)
        if migrated:
            databases.copy_to(str(self.home / "db.sqlite3"))

    def start(self) -> None:
        """Start it, in the foreground of a terminal's own group of processes."""
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                make(self.target), cwd=REPO, env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                process_group=0,
            )  # fmt: skip

    def __enter__(self) -> MadeServer:
        self.start()
        try:
            eventually(self._is_set_up, deadline=240)
            self._sign_in()
        except BaseException:
            if self.process.poll() is None:
                self.press_ctrl_c()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.browser.close()
        code = self.press_ctrl_c()
        if error is None:
            self.has_ended_well(code)

    def has_ended_well(self, code: int) -> None:
        """Check that nothing went wrong or is left, and that it ended as a shell wants it of what Ctrl-C ends."""
        assert code in (-signal.SIGINT, 128 + signal.SIGINT), self.said()
        assert not re.search("Traceback|the demo|can't be set up", self.said()), self.said()
        eventually(lambda: not self.processes())  # agents of Ray notice a moment later that it has ended

    def said(self) -> str:
        return self.output.read_text()

    def _is_set_up(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(self.said())
        return ("  Demo" if self.target != "run" else "\nLogs:") in self.said()

    def _sign_in(self) -> None:
        """Use the link that the console names: DSTACKWEB_HOME=… make login."""
        link = subprocess.run(make("login"), cwd=REPO, env=self.env, capture_output=True, text=True, check=True).stdout
        page = self.browser.get(link.strip())
        answer = self.browser.post(link.strip(), data=body_of(page.text))
        assert answer.status_code == 200
        assert "/login" not in answer.url.path

    def press_ctrl_c(self) -> int:
        """As a terminal does, to all processes of the foreground; returns the exit code of `make`."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(120)

    def processes(self) -> list[str]:
        """The command lines of what the demo has started and is still there."""
        mark, lines = f"DSTACKWEB_HOME={self.home}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    lines.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return lines

    def page(self, path: str) -> str:
        """The text of a page of the project, without its tags."""
        answer = self.browser.get(f"/p/main/{path}")
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"].startswith("text/html")
        return " ".join(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", answer.text, flags=re.DOTALL).split())

    def commands(self) -> list[str]:
        """Read the command lines that the console offers for a run on the demo's cloud or cluster."""
        return re.findall(r"\.venv/bin/(dstackweb .*)", self.said().partition("  Demo")[2])

    def type_command(self, command: str) -> str:
        """Run it in another terminal, and agree to what it asks; returns what it prints."""
        done = subprocess.run(
            [f"{sys.prefix}/bin/{command.split()[0]}", *command.split()[1:]],
            cwd=REPO, env=self.env, input="y\n", capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def free_pair_of_ports() -> int:
    """A port that is free, as is the one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.mark.slow
def test_make_run_runs_what_readme_submits(tmp_path: Path) -> None:
    server = MadeServer("run", tmp_path)
    server.env["DSTACKWEB_ADMIN_TOKEN"] = token = "dw_token-of-the-reader-1"
    with server:
        server.type_command(f"dstackweb login {server.url} --token {token}")
        assert "Hello" in server.type_command("dstackweb apply -f examples/hello.yaml")
        assert re.search(r"hello +done", server.type_command("dstackweb ps -a"))
        assert "hello" in server.page("runs/")


@pytest.mark.slow
@pytest.mark.needs("gcc")
def test_eight_gpus_are_shown_at_work_for_runs(tmp_path: Path) -> None:
    with MadeServer("demo-gpus", tmp_path, migrated=True) as demo:
        assert "GPUs 8 none missing" in demo.page("gpus/")
        eventually(lambda: re.search(r"GPU 0 \d\d % demo-train", demo.page("gpus/")))
        assert re.search(r"GPU 7 \d\d % used outside dstackweb", demo.page("gpus/"))


@pytest.mark.slow
def test_the_offers_of_a_cloud_are_shown_within_its_quotas(tmp_path: Path) -> None:
    with MadeServer("demo-cloud", tmp_path, migrated=True) as demo:
        eventually(lambda: re.search("Fits 1 more: 0 of 96 .*No quota: 0 of 0 ", demo.page("offers/?gpu=A100")))


@pytest.mark.slow
def test_half_a_million_tasks_are_shown_that_move(tmp_path: Path) -> None:
    with MadeServer("demo-progress", tmp_path, migrated=True) as demo:
        eventually(lambda: "Groups 48,000 in 23 prefixes" in demo.page("runs/demo-sweep/progress/"))
        eventually(lambda: re.search(r"Tasks 468,408 [\d,]+ done", demo.page("runs/demo-sweep/progress/")))


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["home", "home/db.sqlite3"])
def test_ctrl_c_ends_a_demo_that_still_starts(tmp_path: Path, begun: str) -> None:
    demo = MadeServer("demo-cloud", tmp_path)
    demo.start()
    eventually((tmp_path / begun).exists)
    demo.has_ended_well(demo.press_ctrl_c())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "cloud",
        "dask",
        pytest.param("gpus", marks=pytest.mark.needs("gcc")),
        "progress",
        pytest.param("ray", marks=pytest.mark.skipif(bool(Ray.missing()), reason="needs requirements-ray.txt")),
        pytest.param("slurm", marks=pytest.mark.needs("root", "slurm")),
    ],
)
def test_a_demo_starts_again_and_runs_what_its_console_offers(tmp_path: Path, name: str) -> None:
    with MadeServer(f"demo-{name}", tmp_path):
        pass
    with MadeServer(f"demo-{name}", tmp_path) as demo:
        assert "Highest priority first" in demo.page("queue/")
        commands = demo.commands()
        assert bool(commands) == (name in ("cloud", "dask", "ray", "slurm"))
        for command in commands:
            output = demo.type_command(command)
            assert "apply" not in command or "step 5" in output or "working: 5 of 5" in output, output
