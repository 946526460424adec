"""The package as it is installed elsewhere: what is in the wheel, and a server from it in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import dstackweb
from tests.forms import body_of
from tests.server import TOKEN
from tests.support import REPO, eventually, free_port

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

ASSETS = ("templates", "static", "locale", "examples")
FILES = ("manage.py", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "requirements.txt")
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
RUNS = "/api/v1/projects/main/runs"


def python(*argv: str | Path, program: str | Path = sys.executable, cwd: Path = REPO) -> None:
    done = subprocess.run([program, *argv], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: a build leaves files beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel") / "tree"
    for name in ("dstackweb", *ASSETS):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPO / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    python("-m", "pip", "wheel", "--no-deps", "--wheel-dir", tree / "dist", tree)
    return tree / "dist" / f"dstackweb-{dstackweb.__version__}-py3-none-any.whl"


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_each_file_that_the_command_line_or_the_server_reads_and_no_other(
    tree: Path, wheel: Path
) -> None:
    packed = {name: content for name, content in contents(wheel).items() if ".dist-info/" not in name}
    code = [*tree.glob("dstackweb/**/*.py"), *tree.glob("dstackweb/cli/locale/**/*.mo")]
    expected = {str(path.relative_to(tree)): path for path in code}
    for name in ASSETS:
        expected |= {f"dstackweb/assets/{p.relative_to(tree)}": p for p in (tree / name).rglob("*") if p.is_file()}
    assert sorted(packed) == sorted(expected)
    assert [name for name, path in expected.items() if path.read_bytes() != packed[name]] == []


def test_a_wheel_from_the_sdist_is_the_same(tree: Path, wheel: Path, tmp_path: Path) -> None:
    python("-m", "venv", tmp_path / "venv")
    requires = tomllib.loads((tree / "pyproject.toml").read_text())["build-system"]["requires"]
    builder = tmp_path / "venv" / "bin" / "python"
    python("-m", "pip", "install", *requires, program=builder)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    python("-c", build, program=builder, cwd=tree)
    [sdist] = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert {name.split("/")[1] for name in archive.getnames() if "/" in name} == {
            *FILES, "dstackweb", *ASSETS, "PKG-INFO", "setup.cfg", "dstackweb.egg-info",
        }  # fmt: skip
    python("-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, sdist)
    assert contents(tmp_path / wheel.name) == contents(wheel)


class Install:
    """The wheel in an environment of its own, and a folder in which its server is started."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.folder = folder / "venv" / "bin", folder / "work"
        self.port = free_port()
        self.env = {"DSTACKWEB_PORT": str(self.port), "DSTACKWEB_GATEWAY_PORT": "0", "DSTACKWEB_ADMIN_TOKEN": TOKEN}
        self.folder.mkdir()
        python("-m", "venv", folder / "venv")

    def pip(self, *argv: str | Path) -> None:
        python("-m", "pip", *argv, program=self.bin / "python")

    def manage(self, *argv: str, code: int = 0, **env: str) -> str:
        """What `dstackweb-server` with these words prints, on both streams."""
        done = subprocess.run(
            [self.bin / "dstackweb-server", *argv], cwd=self.folder, env=self.env | env, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    @contextmanager
    def serving(self, **env: str) -> Iterator[tuple[httpx.Client, Path]]:
        """A server, with a client for it and the file of what it prints."""
        console = self.folder / "console"
        with console.open("wb") as out:
            server = subprocess.Popen(
                [self.bin / "dstackweb-server", "up"], cwd=self.folder, env=self.env | env, stdout=out, stderr=out
            )

        def is_ready() -> bool:
            assert server.poll() is None, console.read_text()
            return "is ready at" in console.read_text()

        try:
            eventually(is_ready, deadline=120)
            with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=HEADERS, timeout=30) as client:
                yield client, console
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(90)


@pytest.mark.nightly
def test_a_server_from_the_wheel_serves_runs_reloads_and_comes_back_from_a_backup(wheel: Path, open_home: Path) -> None:
    install = Install(open_home)
    install.pip("install", "--no-deps", wheel)
    assert "pip install 'dstackweb[server]'" in install.manage("up", code=1)
    assert install.manage("--version") == f"dstackweb {dstackweb.__version__}\n"
    install.pip("install", "--no-deps", "--require-hashes", "-r", REPO / "requirements.txt")
    install.pip("install", "--no-index", f"{wheel}[server]")  # the pinned packages are all that it asks for
    assert "no database in" in (refusal := install.manage("login_link", code=1))
    assert "`dstackweb-server up`" in refusal
    assert "no deployment in" in install.manage("backup", str(open_home / "nothing.tar"), code=1)
    shutil.rmtree(install.folder / "var")
    # No program of the server imports what happens to be in the folder.
    (install.folder / "yaml.py").write_text("raise SystemExit('not the package')\n")
    (install.folder / "django.py").write_text("raise SystemExit('not the package')\n")

    with install.serving() as (client, console):
        [login] = re.findall(r"`(DSTACKWEB_HOME=\S+ \S+/dstackweb-server login_link)`", console.read_text())
        page = client.get("/login/")
        assert page.status_code == 200
        for pattern, kind in ((r'"(/static/site\.\w+\.css)"', "text/css"), (r'"(/static/app\.\w+\.js)"', "javascript")):
            [address] = re.findall(pattern, page.text)
            answer = client.get(address)
            assert answer.status_code == 200
            assert kind in answer.headers["Content-Type"]
            assert len(answer.content) > 20_000
        assert "<code>dstackweb-server login_link</code>" in page.text
        assert "登录" in client.get("/login/", headers={"Accept-Language": "zh-CN"}).text

        link = subprocess.run(login, shell=True, env=install.env, capture_output=True, text=True, check=True).stdout
        with httpx.Client(follow_redirects=True) as browser:
            confirm = browser.get(link.strip())
            browser.post(link.strip(), data=body_of(confirm.text), headers={"Referer": link.strip()})
            submit = browser.get(client.base_url.join("/p/main/submit/"))
        assert submit.status_code == 200
        examples = {path.stem for path in (REPO / "examples").glob("*.yaml")}
        assert {name for name in examples if f'">{name}</button>' in submit.text} == examples

        config = {"type": "task", "name": "first", "commands": ["echo from the wheel"]}
        assert client.post(RUNS, json={"config": config}).status_code == 201
        assert eventually(lambda: client.get(f"{RUNS}/first").json()["status"] in ("done", "failed"))
        run = client.get(f"{RUNS}/first").json()
        log = client.get(f"{RUNS}/first/logs").text
        assert (run["status"], run["exit_code"], log) == ("done", 0, "from the wheel\n"), run

        assert "It goes on where it was started" in install.manage("up")
        assert client.get(f"{RUNS}/first").status_code == 200
        install.manage("backup", "../backup.tar", "--with-secret-key")

    elsewhere = str(open_home / "elsewhere")
    install.manage("restore", "../backup.tar", DSTACKWEB_HOME=elsewhere)
    with install.serving(DSTACKWEB_HOME=elsewhere) as (client, _console):
        assert client.get(f"{RUNS}/first").json()["id"] == run["id"]
        assert client.get(f"{RUNS}/first/logs").text == "from the wheel\n"
    assert os.listdir(install.folder / "var" / "joblogs"), "the first home is as it was"
