from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from typer import testing
from typer.testing import CliRunner, Result

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import create_token
from dstackweb.cli import client
from dstackweb.cli.main import app
from tests.cli.proxy import Proxy
from tests.factories import join, make_project, make_user
from tests.support import REPO


def read(process: subprocess.Popen[bytes], count: int) -> bytes:
    """The next bytes of a process's stdout, as they come."""
    assert process.stdout is not None
    data = b""
    while len(data) < count and (more := process.stdout.read(count - len(data))):
        data += more
    return data


# Reading the declarations of all commands takes longer than most of them.
testing._get_command = functools.cache(testing._get_command)


class Cli:
    """`dstackweb …` against a server, with a configuration folder and a working directory of its own."""

    def __init__(self, url: str, token: str, home: Path, work: Path) -> None:
        self.url, self.token, self.home, self.work = url, token, home, work
        self.env = {
            "DSTACKWEB_URL": url,
            "DSTACKWEB_TOKEN": token,
            "DSTACKWEB_PROJECT": "main",
            "XDG_CONFIG_HOME": str(home),
        }
        self._open: list[subprocess.Popen[bytes]] = []

    def __call__(self, *args: str, input: str | None = None, **env: str | None) -> Result:
        """In this process; `env` None takes a variable away."""
        return CliRunner().invoke(app, args, input=input, env={**self.env, **env}, catch_exceptions=False)

    def ok(self, *args: str, **kwargs: Any) -> str:
        """What a command writes to stdout when it succeeds."""
        result = self(*args, **kwargs)
        assert result.exit_code == 0, result.output
        return result.stdout

    def spawn(self, *args: str, **env: str) -> subprocess.Popen[bytes]:
        """In a process of its own, ended with the test."""
        process = subprocess.Popen(
            [sys.executable, "-c", "from dstackweb.cli.main import app; app()", *args],
            cwd=self.work,
            env={**os.environ, "PYTHONPATH": str(REPO), **self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # what was read must not go past what was asked for: `communicate` takes the rest
        )
        self._open.append(process)
        return process

    def file(self, text: str, name: str = "run.yaml") -> str:
        """A run file in the working directory."""
        (self.work / name).write_text(text)
        return name

    def close(self) -> None:
        for process in self._open:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that commands are called in."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def project(db: None) -> Project:
    return make_project("main")


@pytest.fixture
def ada(project: Project) -> User:
    return join(project, make_user("ada"))


@functools.cache
def application() -> WSGIHandler:
    """The server as a function, whose middleware is loaded once."""
    return WSGIHandler()


@pytest.fixture
def connect(
    tmp_path: Path, work: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> Callable[..., Cli]:
    """A command line with a user's fresh token; `url` goes another way than straight to the server.

    The server is called as a function, in the test's transaction. Tests with `live_server` use a real one.
    """
    if "live_server" in request.fixturenames:
        server = request.getfixturevalue("live_server").url
    else:
        server = "http://localhost:8000"
        settings.ALLOWED_HOSTS = ["localhost"]
        transport = httpx.WSGITransport(application())
        monkeypatch.setattr(client, "Api", functools.partial(client.Api, transport=transport))
        for signal in (request_started, request_finished):  # as in Django's test client: the test's connection stays
            signal.disconnect(close_old_connections)
            request.addfinalizer(functools.partial(signal.connect, close_old_connections))  # noqa: PT021

    def make(user: User, url: str = "") -> Cli:
        made = Cli(url or server, create_token(user, "test")[1], tmp_path / "config", work)
        request.addfinalizer(made.close)
        return made

    return make


@pytest.fixture
def cli(connect: Callable[..., Cli], ada: User) -> Cli:
    """The command line of ada, a member of the project `main`."""
    return connect(ada)


@pytest.fixture
def proxy(live_server: Any) -> Iterator[Proxy]:
    """A way to the server that can be cut."""
    made = Proxy(live_server.thread.host, live_server.thread.port)
    yield made
    made.down()
