"""A server that is upgraded while it runs: by SIGHUP, or by starting it again. No request is refused meanwhile."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server import TOKEN, Server
from tests.setup_lock import set_up_elsewhere
from tests.support import REPO, eventually

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("reload")]

PROBE = "dstackweb/api/monitoring.py"
ANSWER = '{"status": "ok"}'
DEADLINE = 180.0


class Poller(threading.Thread):
    """Asks again and again until it is stopped, on a connection kept alive or on a new one each time."""

    def __init__(self, port: int, *, keep: bool) -> None:
        super().__init__(daemon=True)
        self.keep, self.answered = keep, 0
        self.failures: list[str] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.05):
            try:
                self._connection.request("GET", "/readyz")
                answer = self._connection.getresponse()
                answer.read()
                if answer.status != 200:
                    self.failures.append(str(answer.status))
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
                self._connection.close()
            if not self.keep:
                self._connection.close()
            self.answered += 1

    def end(self) -> None:
        self._done.set()
        self.join(70)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of a checkout of its own, with a file of settings."""
    with tempfile.TemporaryDirectory(prefix="reload-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as folder:
        Path(folder).chmod(0o755)
        yield from checkout(Path(folder))


def checkout(folder: Path) -> Iterator[Server]:
    tree, home = folder / "tree", folder / "home"
    home.mkdir()
    tree.mkdir()
    shutil.copytree(REPO / "dstackweb", tree / "dstackweb", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "manage.py", tree)
    for name in ("templates", "static"):
        (tree / name).symlink_to(REPO / name)
    settings = folder / "settings"
    settings.write_text("# nothing yet\n")
    with Server(
        home, tree=tree, PYTHONPATH=str(tree), DSTACKWEB_ENV_FILE=str(settings), DSTACKWEB_LOG_FORMAT="json"
    ) as running:
        eventually(lambda: "is ready at" in running.said(), deadline=DEADLINE)
        yield running


def edit(tree: Path, path: str, old: str, new: str) -> None:
    """As an upgrade does it: a new file in the old one's place."""
    text = (tree / path).read_text()
    assert old in text
    (tree / f"{path}.new").write_text(text.replace(old, new))
    (tree / f"{path}.new").replace(tree / path)


@pytest.fixture
def pollers(server: Server) -> Iterator[list[Poller]]:
    """Requests that go on during the test; none may fail."""
    started = [Poller(server.port, keep=keep) for keep in (True, False, False)]
    for poller in started:
        poller.start()
    yield started
    for poller in started:
        poller.end()
    assert [poller.failures for poller in started] == [[], [], []]
    assert all(poller.answered > 20 for poller in started)


class SlowSubmit:
    """A submit of 2 MiB that may take minutes (`web_worker.RATE`), of whose end a byte arrives each second."""

    def __init__(self, server: Server) -> None:
        body = b" " * (2 << 20) + json.dumps({"config": {"type": "task", "commands": ["true"]}}).encode()
        self._rest, self._over = body[-600:], threading.Event()
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.putrequest("POST", "/api/v1/projects/main/runs")
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", "Content-Length": len(body)}
        for name, value in headers.items():
            self._connection.putheader(name, str(value))
        self._connection.endheaders(body[:-600])
        self._sender = threading.Thread(target=self._send)
        self._sender.start()

    def _send(self) -> None:
        while not self._over.wait(1):
            self._connection.send(self._rest[:1])
            self._rest = self._rest[1:]
        self._connection.send(self._rest)

    def finish(self) -> int:
        self._over.set()
        self._sender.join()
        return self._connection.getresponse().status


def reloads(server: Server) -> int:
    return server.said().count("dstackweb: reloaded in")


def test_sighup_takes_new_code_and_settings_refuses_no_request_and_touches_no_job(
    server: Server, pollers: list[Poller]
) -> None:
    name = server.submit("echo line 1", "while ! [ -e over ]; do sleep 0.1; done", "echo once >> executed")
    eventually(lambda: b"line 1" in server.log(name), deadline=DEADLINE)
    run = server.run(name)
    runner, before = server.runner_pid(run), set(server.role_pids("dstackweb.manage") + server.role_pids("gunicorn"))
    assert server.http.get(f"{server.url}/healthz", headers={"Host": "new.example.org"}).status_code == 400
    edit(server.tree, PROBE, ANSWER, '{"status": "ok", "release": "next"}')
    Path(server.env["DSTACKWEB_ENV_FILE"]).write_text('DSTACKWEB_ALLOWED_HOSTS="127.0.0.1,localhost,new.example.org"\n')
    assert server.process is not None

    slow = SlowSubmit(server)
    server.process.send_signal(signal.SIGHUP)

    eventually(lambda: '"next"' in server.http.get(f"{server.url}/healthz").text, deadline=DEADLINE)
    threading.Event().wait(6)  # longer than a busy process usually takes for a request
    assert slow.finish() == 201
    eventually(lambda: reloads(server) == 1, deadline=DEADLINE)
    answer = server.http.get(f"{server.url}/healthz", headers={"Host": "new.example.org"})
    assert answer.json() == {"status": "ok", "release": "next"}
    after = set(server.role_pids("dstackweb.manage") + server.role_pids("gunicorn"))
    assert before & after == {server.process.pid}, "only the supervisor's process is still the same"
    assert server.runner_pid(server.run(name)) == runner
    (server.home / "runs" / run["id"] / "node-0" / "over").touch()
    assert server.wait(name, deadline=DEADLINE)["status"] == "done"
    assert server.file_of(run, "executed") == "once\n"
    again = server.submit("true")
    assert server.wait(again, deadline=DEADLINE)["status"] == "done"


def test_a_second_start_reloads_the_server_that_is_there(server: Server, pollers: list[Poller]) -> None:
    httpx.get(f"{server.url}/healthz")
    count, counted = reloads(server), probes(server)
    done = up_again(server)
    assert probes(server) == counted >= 1
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.endswith("dstackweb: reloaded. It goes on where it was started, with the settings from there\n")
    assert reloads(server) == count + 1


def probes(server: Server) -> float:
    lines = server.metrics().splitlines()
    found = [line for line in lines if line.startswith("dstackweb_http_request_seconds_count") and '"healthz"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found if '"2xx"' in line)


def test_requests_are_counted_over_all_web_processes(server: Server) -> None:
    before = probes(server)
    for _ in range(40):
        httpx.get(f"{server.url}/healthz")  # each on a connection of its own, which either process may take
    assert [probes(server) - before for _ in range(6)] == [40] * 6


def test_a_program_that_is_broken_replaces_nothing(server: Server, pollers: list[Poller]) -> None:
    count = reloads(server)
    edit(server.tree, PROBE, "from __future__", "nonsense from __future__")
    try:
        done = up_again(server)
    finally:
        edit(server.tree, PROBE, "nonsense from __future__", "from __future__")
    assert done.returncode == 1
    assert "not reloaded" in done.stderr
    assert "goes on as it was" in done.stderr
    assert reloads(server) == count
    assert "SyntaxError" in server.said()


def test_the_log_of_a_runner_names_the_request_that_caused_it(server: Server) -> None:
    """A pass of the ticker may be first with a run, but not each time."""

    def log_of(number: int) -> str:
        config = {"config": {"type": "task", "commands": ["true"]}}
        run = server.api("POST", "runs", json=config, headers={"X-Request-ID": f"req-{number}"}).json()
        job = server.wait(run["name"], deadline=DEADLINE)["jobs"][0]["id"]
        return (server.home / "jobs" / job / "runner.log").read_text()

    assert any(f"started because of request req-{number}" in log_of(number) for number in range(10))
    lines = [json.loads(line) for line in (server.home / "logs" / "web.log").read_text().splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])


def test_a_restart_listens_before_it_prepares_anything_so_that_requests_wait(server: Server) -> None:
    server.stop()
    with set_up_elsewhere(server.env.get("DATABASE_URL", f"sqlite:///{server.home}/db.sqlite3")):
        server.launch()
        eventually(lambda: accepts(server), deadline=DEADLINE)
    assert httpx.get(f"{server.url}/readyz", timeout=DEADLINE).status_code == 200
    eventually(server.is_ready, deadline=DEADLINE)


def accepts(server: Server) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.port)) == 0


def up_again(server: Server) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "up"], cwd=server.tree, env=server.env, capture_output=True, text=True,
        check=False, timeout=DEADLINE,
    )  # fmt: skip
