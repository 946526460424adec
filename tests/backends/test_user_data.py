"""The script that a cloud's machine runs at its first boot, run by a real shell."""

from __future__ import annotations

import hashlib
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dstackweb.backends.user_data import user_data

LIMIT_BYTES = 16384
"""EC2's limit, before encoding."""
AGENT = b'import sys; print("agent", *sys.argv[1:])'


class Site:
    """A server that has one file, after so many failures."""

    def __init__(self) -> None:
        self.agent, self.failures, self.asked = AGENT, 0, 0
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked += 1
                self.send_response(503 if site.asked <= site.failures else 200)
                self.end_headers()
                self.wfile.write(site.agent if self.path == "/api/v1/runner/pyz" else b"")

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.shutdown()
    site.server.server_close()


def script(url: str, *, sha256: str = hashlib.sha256(AGENT).hexdigest(), insecure: bool = False) -> str:
    return user_data(api_url=url, instance="i-1", join_token="once", pyz_sha256=sha256, insecure=insecure)


def allocation(url: str, agent: bytes = AGENT) -> str:
    """The script of a user's allocation."""
    text = user_data(
        api_url=url, instance="i-1", join_token="once", pyz_sha256=hashlib.sha256(agent).hexdigest(), insecure=False,
        allocation=True,
    )  # fmt: skip
    return text.replace("$(id -u)", "7")


def boot(folder: Path, text: str, *, python: str = sys.executable) -> str:
    """Run it on a machine whose `shutdown` only says so and whose `sleep` takes no time; all that it said."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for name, does in (("shutdown", 'echo "shutdown $*"; kill -9 $PPID'), ("sleep", 'echo "sleep $1"')):
        (binaries / name).write_text(f"#!/bin/sh\n{does}\n")
        (binaries / name).chmod(0o755)
    for name in ("mkdir", "chmod", "rm"):
        if not (binaries / name).exists():
            (binaries / name).symlink_to(f"/bin/{name}")
    if python:
        (binaries / "python3").write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
        (binaries / "python3").chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", text], env={"PATH": str(binaries), "HOME": str(folder)}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60,
    )  # fmt: skip
    return done.stdout


def test_the_agent_is_fetched_checked_and_started(tmp_path: Path, site: Site) -> None:
    said = boot(tmp_path, script(f"{site.url}/"))
    assert f"agent agent --api {site.url} --instance i-1 --home {tmp_path}/.dstackweb/i-1\n" in said
    assert "shutdown" not in said
    for entered in (".dstackweb", ".dstackweb/i-1"):
        assert (tmp_path / entered).stat().st_mode & 0o777 == 0o711
    assert (tmp_path / ".dstackweb/i-1/runner.pyz").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_an_allocation_lasts_as_long_as_its_agent_shuts_nothing_down_and_leaves_nothing(
    tmp_path: Path, site: Site
) -> None:
    said = boot(tmp_path, allocation(site.url))
    assert "--home" in said
    assert "--allocation" in said
    assert "shutdown" not in said
    assert not (tmp_path / ".dstackweb/i-1").exists()
    site.failures = 1000
    said = boot(tmp_path, allocation(site.url, b"another version"))
    assert said.endswith("the agent cannot be downloaded\n")


def test_an_allocation_uses_the_runner_that_another_left_unless_somebody_has_changed_it(
    tmp_path: Path, site: Site
) -> None:
    boot(tmp_path, allocation(site.url))
    assert "agent agent" in boot(tmp_path, allocation(site.url))
    assert site.asked == 1
    [kept] = (tmp_path / ".dstackweb").glob("runner-*.pyz")
    for change in (lambda: kept.write_bytes(b'print("mine")'), lambda: os.mkfifo(kept), lambda: kept.symlink_to("/")):
        kept.unlink()
        change()
        asked, said = site.asked, boot(tmp_path, allocation(site.url))
        assert ("agent agent" in said, "mine" in said, site.asked) == (True, False, asked + 1), said
    site.failures = 1000
    assert "agent agent" in boot(tmp_path, allocation(site.url))


def test_a_runner_that_no_allocation_has_used_for_a_month_is_removed(tmp_path: Path, site: Site) -> None:
    (tmp_path / ".dstackweb").mkdir()
    for name, days in (("old", 31), ("young", 29)):
        file = tmp_path / f".dstackweb/runner-{name}.pyz"
        file.touch()
        os.utime(file, (0, time.time() - days * 86400))
    boot(tmp_path, allocation(site.url))
    left = {path.name for path in (tmp_path / ".dstackweb").iterdir()}
    assert left == {f"runner-{hashlib.sha256(AGENT).hexdigest()}.pyz", "runner-young.pyz"}


def test_a_wrapper_of_python_is_called_once(tmp_path: Path, site: Site) -> None:
    (tmp_path / "wrapper").write_text(f'#!/bin/sh\necho >> {tmp_path}/called\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "wrapper").chmod(0o755)
    assert "agent agent" in boot(tmp_path, script(site.url), python=str(tmp_path / "wrapper"))
    assert (tmp_path / "called").read_text() == "\n"


def test_plain_http_to_another_machine_needs_an_explicit_setting(tmp_path: Path, site: Site) -> None:
    assert "--insecure" in boot(tmp_path, script(site.url, insecure=True))


def test_an_unreachable_server_is_retried_with_growing_pauses(tmp_path: Path, site: Site) -> None:
    site.failures = 3
    said = boot(tmp_path, script(site.url))
    assert [line for line in said.splitlines() if line.startswith("sleep")] == ["sleep 1", "sleep 2", "sleep 4"]
    assert "HTTP Error 503" in said
    assert "agent agent" in said


@pytest.mark.slow
def test_an_agent_that_cannot_be_fetched_shuts_the_instance_down(tmp_path: Path, site: Site) -> None:
    site.failures = 1000
    said = boot(tmp_path, script(site.url))
    assert site.asked == 14
    assert said.endswith("the agent cannot be downloaded; shutting down\nsleep 5\nshutdown -h now\n")


@pytest.mark.slow
def test_a_file_with_another_digest_is_never_started(tmp_path: Path, site: Site) -> None:
    said = boot(tmp_path, script(site.url, sha256="0" * 64))
    assert "expected 0000" in said
    assert "agent agent" not in said
    assert "shutdown -h now" in said
    assert not (tmp_path / ".dstackweb/i-1/runner.pyz").exists()


@pytest.mark.parametrize("python", ["", "/bin/false"])
def test_an_instance_without_a_recent_python_logs_that_and_shuts_down(tmp_path: Path, python: str) -> None:
    said = boot(tmp_path, script("http://127.0.0.1:9"), python=python)
    assert "the agent needs Python 3.9 or newer" in said
    assert "shutdown -h now" in said


@pytest.mark.parametrize(("status", "tries"), [(1, 20), (2, 1)])
def test_an_agent_that_never_starts_shuts_the_instance_down(
    tmp_path: Path, site: Site, status: int, tries: int
) -> None:
    site.agent = f'print("tried", flush=True); raise SystemExit({status})'.encode()
    said = boot(tmp_path, script(site.url, sha256=hashlib.sha256(site.agent).hexdigest()))
    assert said.count("tried") == tries
    assert f"the agent does not start ({status}); shutting down" in said


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=60))
def test_values_are_quoted_for_the_shell(value: str) -> None:
    text = user_data(api_url="https://x", instance=value, join_token=value, pyz_sha256="0", insecure=False)
    begin = text.partition("umask")[0]
    found = subprocess.run(
        ["/bin/sh", "-c", begin + "printf '%s\\0%s' \"$instance\" \"$DSTACKWEB_JOIN_TOKEN\""],
        capture_output=True, check=True,
    ).stdout  # fmt: skip
    assert found == f"{value}\0{value}".encode()
    assert len(text.encode()) < LIMIT_BYTES
