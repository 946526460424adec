"""`manage.py up` and the supervisor below it, as real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from pytest_django import Settings

from dstackweb.accounts.bootstrap import Bootstrap
from dstackweb.lib.commands import server_command
from dstackweb.scheduler.management.commands.up import banner
from dstackweb.scheduler.processes import supervisor as supervisor_module
from dstackweb.scheduler.processes.supervisor import ProcessLog
from tests.support import REPO, eventually, free_port

START = """
import sys
from pathlib import Path
from dstackweb.scheduler.processes.supervisor import ProcessSpec, Supervisor
roles = [ProcessSpec(f"role{n}", [sys.executable, "-c", code]) for n, code in enumerate(sys.argv[2:])]
say = lambda line: print(line, flush=True)
Supervisor(roles, Path(sys.argv[1]), say).run(lambda: say("all answer"))
say("stopped")
"""
SUPERVISED = "from dstackweb.lib.process import die_with_supervisor; die_with_supervisor(); import os, signal, time\n"
SLEEP = SUPERVISED + "time.sleep(60)"


class Console:
    """A started program and what it has printed so far."""

    def __init__(self, argv: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
        self.path = folder / "console.txt"
        with self.path.open("wb") as out:
            self.process = subprocess.Popen(argv, cwd=REPO, env=env, stdout=out, stderr=out)

    @property
    def text(self) -> str:
        return self.path.read_text()

    def wait_for(self, pattern: str, deadline: float = 5) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            assert self.process.poll() is None or re.search(pattern, self.text), self.text
            return re.search(pattern, self.text)

        return eventually(found, deadline)

    def end(self, number: int, deadline: float = 10) -> int:
        self.process.send_signal(number)
        return self.process.wait(deadline)


Supervise = Callable[..., Console]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    """`supervise(code, …)`: a supervisor with a role for each piece of Python."""
    started: list[Console] = []

    def start(*roles: str) -> Console:
        started.append(Console([sys.executable, "-c", START, str(tmp_path / "logs"), *roles], tmp_path))
        return started[-1]

    yield start
    for console in started:
        console.process.kill()
        console.process.wait()


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def ended(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_a_role_that_ends_is_named_with_its_last_words_and_started_again(supervise: Supervise, tmp_path: Path) -> None:
    console = supervise("print('no such disk'); raise SystemExit(3)", SLEEP)

    console.wait_for(r"role0 ended with exit code 3 \(no such disk\); restarting in [\d.]+ s \(log: .*role0\.log\)")
    eventually(lambda: (tmp_path / "logs" / "role0.log").read_text().count("no such disk") >= 2)


def test_a_role_that_is_killed_is_started_again(supervise: Supervise) -> None:
    console = supervise(SLEEP)
    console.wait_for("all answer")
    [first] = descendants(console.process)

    first.kill()

    console.wait_for("role0 was killed by SIGKILL")
    eventually(lambda: descendants(console.process) not in ([], [first]))


def test_errors_reach_the_console_with_their_role_and_the_rest_only_its_log(
    supervise: Supervise, tmp_path: Path
) -> None:
    console = supervise("print('12:00 INFO x: fine\\n12:01 ERROR x: broken', flush=True)\nimport time; time.sleep(60)")

    console.wait_for(r"\[role0\] 12:01 ERROR x: broken")
    assert "fine" not in console.text
    assert "fine" in (tmp_path / "logs" / "role0.log").read_text()


def test_ctrl_c_ends_all_roles_and_the_supervisor_without_complaint(supervise: Supervise) -> None:
    console = supervise(SLEEP, SLEEP)
    console.wait_for("all answer")
    below = descendants(console.process)

    assert console.end(signal.SIGINT) == 0
    assert ended(below)
    assert console.text == "all answer\nstopped\n"


def test_a_second_ctrl_c_ends_a_role_that_does_not_listen(supervise: Supervise) -> None:
    console = supervise(
        SUPERVISED + "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf ERROR ')\ntime.sleep(60)"
    )
    console.wait_for("deaf")
    below = descendants(console.process)

    console.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        console.process.wait(0.5)

    assert console.end(signal.SIGINT) == 0
    assert ended(below)


def test_a_log_that_has_grown_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "LOG_LIMIT", 10)
    log = ProcessLog(tmp_path, "web")

    log.write(b"a first line\n")
    log.write(b"more\n")

    assert (tmp_path / "web.log").read_text() == "more\n"
    assert (tmp_path / "web.log.1").read_text() == "a first line\n"


def test_sighup_stops_a_supervisor_that_has_no_next_program(tmp_path: Path) -> None:
    console = Console([sys.executable, "-c", START, str(tmp_path / "logs"), SLEEP], tmp_path)
    console.wait_for("all answer")
    assert console.end(signal.SIGHUP) == 0
    assert console.text.endswith("stopped\n")


def up(env: dict[str, str]) -> Console:
    return Console([sys.executable, "manage.py", "up"], Path(env["DSTACKWEB_HOME"]), env)


@pytest.mark.slow
def test_a_port_in_use_is_reported_in_one_line(deployment: dict[str, str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(deployment["DSTACKWEB_PORT"])))
        other.listen()
        console = up(deployment)

        assert console.process.wait(30) == 1
    assert re.fullmatch(r"dstackweb: port \d+ of 127\.0\.0\.1 is in use\. .* set DSTACKWEB_PORT\n", console.text)


def login_link(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "login_link"], cwd=REPO, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["login_link", "recount --check", "prune", "changepassword admin"])
def test_a_command_before_the_first_start_is_refused_with_a_hint(new_deployment: dict[str, str], command: str) -> None:
    argv = [sys.executable, "manage.py", *command.split()]
    asked = subprocess.run(argv, cwd=REPO, env=new_deployment, capture_output=True, text=True, check=False)

    assert asked.returncode == 1
    assert re.fullmatch(r"dstackweb: no database in \S+ yet\. Start the server with `make run`\n", asked.stderr)


@pytest.mark.slow
def test_a_command_names_a_database_that_cannot_be_reached(new_deployment: dict[str, str]) -> None:
    env = new_deployment | {"DATABASE_URL": f"postgresql://a:b@127.0.0.1:{free_port()}/c"}
    argv = [sys.executable, "manage.py", "recount", "--check"]
    asked = subprocess.run(argv, cwd=REPO, env=env, capture_output=True, text=True, check=False)

    assert asked.returncode == 1
    assert asked.stderr.startswith("dstackweb: the database can't be reached: ")
    assert asked.stderr.endswith("Run this again once it answers.\n")
    assert "Traceback" not in asked.stderr


@pytest.mark.parametrize(
    ("home", "command"), [("var", "make login"), ("var/demo", "DSTACKWEB_HOME=/a/var/demo make login")]
)
def test_the_command_for_a_sign_in_link_names_a_home_of_its_own(settings: Settings, home: str, command: str) -> None:
    settings.ASSETS_DIR = Path("/a")
    settings.DSTACKWEB_HOME = settings.ASSETS_DIR / home
    shown = banner(Bootstrap(created=False, username="admin"), Path("/a/var/logs"), 1.0)
    assert f"Sign in    as admin; `{command}` prints a sign-in link" in shown


def test_an_installed_server_names_its_own_programs(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.IS_CHECKOUT, settings.ASSETS_DIR = False, Path("/opt/venv/lib/dstackweb/assets")
    settings.DSTACKWEB_HOME = Path("/a/var")
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin")
    shown = banner(Bootstrap(created=False, username="admin"), Path("/a/var/logs"), 1.0)
    assert "as admin; `DSTACKWEB_HOME=/a/var dstackweb-server login_link` prints a sign-in link" in shown
    assert " dstackweb apply -f /opt/venv/lib/dstackweb/assets/examples/hello.yaml" in shown
    assert server_command("up") == "dstackweb-server up"


@pytest.mark.slow
def test_the_server_prints_the_sign_in_once_stops_cleanly_and_restarts_quickly(
    deployment: dict[str, str], tmp_path: Path
) -> None:
    console = up(deployment)
    address = f"http://127.0.0.1:{deployment['DSTACKWEB_PORT']}"
    console.wait_for(rf"ready at {address}/", deadline=60)
    console.wait_for(r"Sign in    admin / \S{12,}")
    below = descendants(console.process)

    elsewhere = {**deployment, "DSTACKWEB_PORT": str(free_port())}
    second = Console([sys.executable, "manage.py", "up"], tmp_path, elsewhere)
    assert second.process.wait(30) == 1
    assert second.process.wait(30) == 1
    assert re.match(rf"dstackweb: already running at {address} with data in", second.text)
    # `make login` in another terminal doesn't know of a port that was given to `make run` alone.
    link = login_link({**deployment, "DSTACKWEB_PORT": "8000"}).stdout
    assert link.startswith(f"{address}/login/")

    assert console.end(signal.SIGINT, deadline=60) == 0
    assert ended(below)
    assert "Traceback" not in console.text
    assert console.text.endswith("stopped. Running jobs continue\n")

    again = up(deployment)
    again.wait_for("ready at", deadline=60)
    home = deployment["DSTACKWEB_HOME"]
    assert f"Sign in    as admin; `DSTACKWEB_HOME={home} make login` prints a sign-in link" in again.text
    assert again.end(signal.SIGTERM, deadline=60) == 0


@pytest.mark.nightly
def test_a_cluster_whose_main_process_is_killed_ends_its_workers_and_is_restarted(
    deployment: dict[str, str],
) -> None:
    console = up(deployment)
    console.wait_for("ready at", deadline=60)
    [cluster] = [child for child in psutil.Process(console.process.pid).children() if "qcluster" in child.cmdline()]
    workers = cluster.children(recursive=True)
    assert len(workers) >= 4
    try:
        cluster.kill()

        eventually(lambda: ended(workers))
        console.wait_for("workers was killed by SIGKILL; restarting")
        eventually(
            lambda: len([child for child in descendants(console.process) if "qcluster" in child.cmdline()]) >= 5, 15
        )
    finally:
        console.end(signal.SIGTERM, deadline=60)


@pytest.mark.slow
def test_only_detached_runners_survive_kill_9_of_the_server(deployment: dict[str, str]) -> None:
    """A runner is started as this sleeper is: by a worker, as a program, in a session of its own."""
    home = Path(deployment["DSTACKWEB_HOME"])
    console = up(deployment)
    console.wait_for("ready at", deadline=60)
    detach = f"setsid sleep 321 </dev/null >/dev/null 2>&1 & echo $! > {home}/sleeper"
    enqueue = (
        "from django.conf import settings; from django_q.tasks import async_task; "
        f"async_task('subprocess.call', ['sh', '-c', {detach!r}], cluster=settings.DSTACKWEB_CLUSTERS['control'])"
    )
    subprocess.run([sys.executable, "manage.py", "shell", "-c", enqueue], cwd=REPO, env=deployment, check=True)
    sleeper = psutil.Process(int(eventually((home / "sleeper").read_text)))
    below = descendants(console.process)
    assert len(below) >= 8  # web and its worker; a cluster with sentinel, pusher, monitor and two workers; ticker; host
    try:
        os.kill(console.process.pid, signal.SIGKILL)
        console.process.wait()

        eventually(lambda: ended(below))
        assert not ended([sleeper])
    finally:
        sleeper.kill()
