"""A deployment is destroyed with runs in flight, restored from its backup, and goes on."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from dstackweb.lib.ssh_keys import host_fingerprint, host_key
from tests import databases
from tests.second_machine import Machine
from tests.server import Server
from tests.support import eventually

pytestmark = pytest.mark.nightly

IN_FLIGHT = ("echo once >> executed", "for i in 1 2 3; do echo line $i; done", "while [ ! -e go ]; do sleep 0.1; done")


def destroy(server: Server) -> None:
    """All that the server knows, but its key. What runs on the machine goes on."""
    if url := server.env.get("DATABASE_URL"):
        eventually(lambda: not connections(url))  # of the killed server
        databases.create(url.rpartition("/")[2])
    for path in server.home.glob("db.sqlite3*"):
        path.unlink()
    for name in ("joblogs", "archives"):
        shutil.rmtree(server.home / name, ignore_errors=True)


def connections(url: str) -> int:
    """How many others are connected to a database of PostgreSQL."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid != pg_backend_pid()"
    with psycopg.connect(url) as database:
        return database.execute(query).fetchone()[0]


@pytest.mark.both_sides
def test_a_destroyed_deployment_continues_from_its_backup(open_home: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "backup.tar")
    path = f"{databases.programs()}:{os.environ['PATH']}"
    with Server(open_home, PATH=path) as server:
        done = server.submit("echo kept", resources={"cpu": 1})
        server.wait(done)
        running = server.submit(*IN_FLIGHT, "echo line 4", resources={"cpu": 1})
        eventually(lambda: b"line 3" in server.log(running))
        waiting = server.submit("echo once >> executed", resources={"cpu": 100_000})
        made = server.manage("backup", file)
        assert made.returncode == 0, made.stderr
        assert "The secret key (fingerprint" in made.stdout
        assert oct(Path(file).stat().st_mode & 0o777) == "0o600"
        refused = server.manage("restore", file)
        assert "the server is running" in refused.stderr
        # After the backup: a run that is lost, and output that only its spool has.
        lost = server.submit("sleep 600", resources={"cpu": 1})
        server.wait(lost, "running")
        lost_run = server.run(lost)
        run = server.run(running)
        server.stop(signal.SIGKILL)
        eventually(lambda: not server.role_pids("dstackweb.manage"))
        destroy(server)
        Path(open_home / "runs" / run["id"] / "node-0" / "go").touch()

        restored = server.manage("restore", file)
        assert restored.returncode == 0, restored.stderr
        assert "ended on this machine: 1" in restored.stdout
        assert "until its hosts (1)" in restored.stdout
        assert not server.processes_of(lost_run)

        server.start()
        assert server.wait(running, deadline=60)["status"] == "done"
        assert server.log(running) == b"line 1\nline 2\nline 3\nline 4\n"
        assert server.file_of(run, "executed") == "once\n"
        assert server.log(done) == b"kept\n"
        assert server.run(waiting)["status"] == "submitted"
        assert server.http.get(f"/projects/main/runs/{lost}").status_code == 404
        again = server.submit("echo works", resources={"cpu": 1})
        assert server.wait(again)["status"] == "done"
        check = server.manage("recount", "--check")
        assert check.returncode == 0, check.stderr


@pytest.mark.both_sides
def test_what_ran_on_a_host_since_the_backup_is_not_executed_again(open_home: Path, tmp_path: Path) -> None:
    """On the server's own host and on a joined one: a run that has ended, and one that still runs."""
    (far_home := open_home / "far").mkdir()
    file = str(tmp_path / "backup.tar")
    path, everything = f"{databases.programs()}:{os.environ['PATH']}", {"cpu": os.cpu_count()}
    places = {"box": {"disk": "ssd"}, "far": {"disk": "nvme"}}
    with Server(open_home, PATH=path) as server, ExitStack() as stack:
        machine = Machine(far_home)
        stack.callback(machine.stop)
        token = server.http.post("/hosts/invites").json()["token"]
        join = ["--token", token, "--home", str(far_home), "--name", "far", "--label", "disk=nvme"]
        machine.start("host", "join", server.url, *join)
        eventually(lambda: sum(host["cpus"] > 0 for host in server.http.get("/hosts").json()["items"]) == 2)
        assert server.http.patch("/hosts/box", json={"labels": places["box"]}).is_success

        first, ended, lives = {}, {}, {}
        for host, labels in places.items():
            first[host] = server.submit("sleep 600", resources=everything, labels=labels)
            server.wait(first[host], "running")
            ended[host] = server.submit(*IN_FLIGHT[:2], "exit 3", resources=everything, labels=labels)
            lives[host] = server.submit(*IN_FLIGHT, "echo over", resources=everything, labels=labels)
        made = server.manage("backup", file)
        assert made.returncode == 0, made.stderr
        for host in places:
            server.api("POST", f"runs/{first[host]}/stop", json={"abort": True})
            assert server.wait(ended[host])["exit_code"] == 3
            server.wait(lives[host], "running")
            eventually(lambda host=host: b"line 3" in server.log(lives[host]))
        before = {name: server.run(name) for name in (*ended.values(), *lives.values())}
        server.stop(signal.SIGKILL)
        eventually(lambda: not server.role_pids("dstackweb.manage"))
        destroy(server)

        restored = server.manage("restore", file)
        assert restored.returncode == 0, restored.stderr
        server.start()
        for host, home in {"box": open_home, "far": far_home}.items():
            assert server.wait(first[host])["termination_reason"] == "aborted_by_user"
            run = server.wait(ended[host])
            assert (run["status"], run["exit_code"]) == ("failed", 3)
            assert run["jobs"][0]["id"] == before[ended[host]]["jobs"][0]["id"]
            assert server.log(ended[host]) == b"line 1\nline 2\nline 3\n"
            folder = home / "runs" / before[lives[host]]["id"] / "node-0"
            (folder / "go").touch()
            assert server.wait(lives[host])["status"] == "done"
            assert server.log(lives[host]) == b"line 1\nline 2\nline 3\nover\n"
            for name in (ended[host], lives[host]):
                assert (home / "runs" / before[name]["id"] / "node-0" / "executed").read_text() == "once\n"
        check = server.manage("recount", "--check")
        assert check.returncode == 0, check.stderr


def test_another_key_or_a_database_in_use_is_refused_and_nothing_changes(open_home: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "backup.tar")
    server = Server(open_home)
    assert server.manage("backup", file).returncode == 0
    assert "exists" in server.manage("backup", file).stderr
    assert "--replace" in server.manage("restore", file).stderr
    (open_home / "secret_key").write_text("another key, of somebody else, that is long enough")
    before = (open_home / "db.sqlite3").read_bytes()
    refused = server.manage("restore", file, "--replace")
    assert refused.returncode == 1
    assert "another secret key" in refused.stderr
    assert (open_home / "db.sqlite3").read_bytes() == before


def test_a_backup_with_the_key_restores_an_empty_machine(open_home: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "backup.tar")
    server = Server(open_home)
    known_as = host_key(open_home) and host_fingerprint(open_home)
    assert server.manage("backup", file, "--with-secret-key").returncode == 0
    key = (open_home / "secret_key").read_text()
    for path in open_home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = server.manage("restore", file)
    assert done.returncode == 0, done.stderr
    assert (open_home / "secret_key").read_text().strip() == key.strip()
    assert host_key(open_home).stat().st_mode & 0o777 == 0o600
    assert host_fingerprint(open_home) == known_as
    with sqlite3.connect(open_home / "db.sqlite3") as database:
        assert database.execute("SELECT count(*) FROM django_migrations").fetchone()[0] > 0
