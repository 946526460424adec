"""The image is built, and compose.yaml run, by a real Docker: sign-in, a run on a joined host, settings, a backup.

No registry can be reached here: what images begin with is a Debian that mmdebstrap makes, and PostgreSQL and Redis are
Debian's. Docker Compose is Debian's too, of the release that has one which reads compose.yaml.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests import containers
from tests.forms import body_of
from tests.second_machine import Machine
from tests.server import TOKEN
from tests.servers import free_port
from tests.support import REPO, eventually

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("containers"),
    pytest.mark.needs("root", "docker", "mmdebstrap"),
]
SUITE = "trixie"
BASE = "base-of-tests"
CHECKOUT = (
    "Containerfile", "Makefile", "compose.yaml", ".dockerignore", "pyproject.toml", "setup.py", "MANIFEST.in",
    "README.md", "LICENSE", "requirements.txt", "dstackweb", "templates", "static", "locale",
    "examples",
)  # fmt: skip
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PIP_CONFIG = Path("/etc/pip.conf")
PROXIES = {
    name: value for name, value in os.environ.items() if name.lower() in ("http_proxy", "https_proxy", "no_proxy")
}


def from_debian(*argv: str, target: str) -> Path:
    """A file that mmdebstrap makes, kept for the next session."""
    digest = hashlib.sha256(" ".join(argv).encode()).hexdigest()[:12]
    folder = REPO / ".pytest_cache" / "debian" / digest
    if not (folder / target).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            command = [word.replace("TARGET", f"{draft}/{target}").replace("FOLDER", draft) for word in argv]
            subprocess.run(["mmdebstrap", "--quiet", *command], check=True)
            os.replace(Path(draft) / target, folder / target)
    return folder / target


class Compose:
    """`docker compose` in a checkout of its own, with ports of its own."""

    def __init__(self, folder: Path, docker: containers.Docker) -> None:
        self.folder, self.docker = folder, docker
        self.program = from_debian(
            "--variant=extract", "--include=docker-compose",
            "--extract-hook=copy-out /usr/libexec/docker/cli-plugins/docker-compose FOLDER", SUITE, "/dev/null",
            target="docker-compose",
        )  # fmt: skip
        for name in CHECKOUT:
            source = REPO / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        subprocess.run(["make", "-s", ".env"], cwd=folder, check=True)
        assert (folder / ".env").stat().st_mode & 0o777 == 0o600
        build = {"network": "host", "args": {"BASE": BASE, **PROXIES}}
        # The daemon of the tests leaves the machine's firewall alone, so only the machine's own network leads outside.
        override = (
            f"postgres: {{ports: !reset []}}, redis: {{ports: !reset []}}, server: {{build: {json.dumps(build)}}}"
        )
        (folder / "compose.override.yaml").write_text(f"services: {{{override}}}\n")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.set(
            DSTACKWEB_PORT=self.port,
            DSTACKWEB_GATEWAY_PORT=free_port(),
            DSTACKWEB_SSH_PORT=free_port(),
            DSTACKWEB_ADMIN_TOKEN=TOKEN,
        )
        self.api = httpx.Client(base_url=f"{self.url}/api/v1", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)

    def set(self, **settings: object) -> None:
        """Add settings to .env."""
        with (self.folder / ".env").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())

    def __call__(self, *argv: str, **options: Any) -> bytes:
        """`docker compose …`; returns what it printed."""
        env = self.docker.engine.environment() | {"HOME": str(self.folder)}
        call = partial(subprocess.run, cwd=self.folder, env=env, capture_output=True)
        done = call([self.program, *argv], **options)
        if done.returncode:
            logs = call([self.program, "--profile", "server", "logs", "--tail", "40"]).stdout.decode()
            pytest.fail(f"{argv}: {done.stderr.decode()[-4000:]}\n{logs}")
        return done.stdout

    def up(self) -> None:
        """The command of docs/operations.md."""
        self("--profile", "server", "up", "-d", "--wait")

    def id(self) -> str:
        """The container of the server."""
        return self("ps", "--quiet", "server").decode().strip()

    def inspect(self) -> Any:
        return json.loads(self.docker.engine.call("inspect", self.id()))[0]

    def submit(self, *commands: str) -> str:
        config = {"type": "task", "commands": list(commands)}
        response = self.api.post("/projects/main/runs", json={"config": config})
        assert response.is_success, response.text
        return str(response.json()["name"])

    def log_of(self, run: str) -> str:
        """The log of a run, once that is done."""

        def status() -> Any:
            return self.api.get(f"/projects/main/runs/{run}").json()["status"]

        eventually(lambda: status() in ("done", "failed", "terminated"), deadline=120)
        assert status() == "done"
        return self.api.get(f"/projects/main/runs/{run}/logs").text

    def setting(self, name: str) -> Any:
        """A setting as the program in the container reads it."""
        code = f"import json; from django.conf import settings; print(json.dumps(settings.{name}, default=str))"
        return json.loads(self("exec", "-T", "server", "dstackweb-server", "shell", "--no-imports", "-c", code))


@pytest.fixture(scope="module")
def docker() -> Iterator[containers.Docker]:
    """A daemon with the images that compose.yaml and the Containerfile name."""
    hooks = [f"--customize-hook=copy-in {file} {file.parent}" for file in (CERTIFICATES, PIP_CONFIG) if file.exists()]
    packages = "--include=python3,python3-venv,ca-certificates"
    base = from_debian("--variant=apt", packages, *hooks, SUITE, "TARGET", target="base.tar")
    major = re.search(r"^ARG PG_MAJOR=(\d+)$", (REPO / "Containerfile").read_text(), re.MULTILINE)
    assert major is not None
    with containers.docker() as daemon:
        daemon.engine.call("import", str(base), BASE)
        for target, tag in (("postgres", f"postgres:{major[1]}"), ("redis", "redis:8")):
            arguments = {"BASE": BASE, "PG_MAJOR": major[1], **PROXIES}
            options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
            services = REPO / "tests/deploy/services"
            subprocess.run(
                [daemon.engine.program, "build", "--network=host", "--target", target, "-t", tag, *options,
                 "-f", services / "Containerfile", services],
                check=True, capture_output=True, env=daemon.engine.environment(),
            )  # fmt: skip
        yield daemon


@pytest.fixture(scope="module")
def compose(docker: containers.Docker) -> Iterator[Compose]:
    """All containers of compose.yaml, started as the documentation says."""
    with tempfile.TemporaryDirectory(prefix="dw-compose-", dir="/tmp") as folder, ExitStack() as stack:
        deployment = Compose(Path(folder), docker)
        stack.callback(deployment, "--profile", "server", "down", "--volumes", "--timeout", "1")
        stack.callback(deployment.api.close)
        deployment.up()
        yield deployment


@pytest.fixture
def host(compose: Compose, open_home: Path) -> Iterator[Machine]:
    """A machine that joined as `far`."""
    machine = Machine(open_home)
    token = compose.api.post("/hosts/invites").json()["token"]
    machine.start("host", "join", compose.url, "--token", token, "--home", str(open_home), "--name", "far")
    eventually(lambda: any(item["online"] for item in compose.api.get("/hosts").json()["items"]), deadline=60)
    yield machine
    machine.stop()


def test_the_page_is_served_with_its_static_files_by_a_user_without_rights(compose: Compose) -> None:
    link = compose("exec", "-T", "server", "dstackweb-server", "login_link").decode().strip()
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        page = browser.post(link, data=body_of(browser.get(link).text))
        assert page.status_code == 200
        assert "admin" in page.text
        files = re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text)
        assert {Path(urlsplit(file).path).suffix for file in files} >= {".css", ".js"}
        assert {browser.get(f"{compose.url}{file}").status_code for file in files} == {200}
    facts = compose.inspect()
    assert (facts["Config"]["User"], facts["State"]["Health"]["Status"]) == ("10001:10001", "healthy")
    assert (facts["HostConfig"]["ReadonlyRootfs"], facts["HostConfig"]["Init"]) == (True, True)
    script = (
        "set -e; cat /proc/1/comm; id -u; ! touch /opt/dstackweb/x 2>&1; touch /tmp/x /var/lib/dstackweb/x; "
        "grep -hE 'NoNewPrivs|Cap(Bnd|Eff)' /proc/self/status; ! command -v gcc; command -v ssh; "
        "python -c 'import msgpack; print(msgpack.__name__)'"
    )
    lines = compose("exec", "-T", "server", "sh", "-c", script).decode().splitlines()
    assert lines[:3] == ["docker-init", "10001", "touch: cannot touch '/opt/dstackweb/x': Read-only file system"]
    assert [line.split()[1] for line in lines[3:6]] == ["0" * 16, "0" * 16, "1"]
    assert lines[6:] == ["/usr/bin/ssh", "msgpack"], "for Slurm, and for Dask"


def test_a_run_and_its_log_are_there_after_all_was_destroyed_and_restored(compose: Compose, host: Machine) -> None:
    run = compose.submit("echo kept", "id -u")
    assert compose.log_of(run).startswith("kept\n")
    backup = compose("exec", "-T", "server", "dstackweb-server", "backup", "--with-secret-key", "-")
    compose("--profile", "server", "down", "--volumes")
    compose("--profile", "server", "stop", "server")
    compose("run", "--rm", "-T", "server", "restore", "--replace", "-", input=backup)
    compose.up()
    assert compose.log_of(run).startswith("kept\n")
    # The host's token was in the backup.
    assert compose.log_of(compose.submit("echo again")) == "again\n"


def test_the_image_alone_serves_with_sqlite_and_keeps_its_data(compose: Compose, docker: containers.Docker) -> None:
    port = free_port()
    docker.engine.call("network", "create", "alone")

    def start() -> None:
        docker.engine.call(
            "run", "-d", "--name", "alone", "--hostname", "dstackweb", "--init", "--read-only", "--tmpfs", "/tmp",
            "--network", "alone", "-p", f"127.0.0.1:{port}:8000", "-v", "alone:/var/lib/dstackweb", "dstackweb",
        )  # fmt: skip
        health = ("inspect", "--format", "{{.State.Health.Status}}", "alone")
        eventually(lambda: docker.engine.call(*health).strip() == "healthy", deadline=240)

    start()
    command = ("exec", "alone", "dstackweb-server", "shell", "--no-imports", "-c")
    docker.engine.call(*command, "from dstackweb.accounts.models import User; User.objects.create(username='kept')")
    docker.engine.call("rm", "-f", "alone")
    start()
    assert "kept" in docker.engine.call(
        *command, "from dstackweb.accounts.models import User; print(*User.objects.values_list('username', flat=True))"
    )
    assert httpx.get(f"http://127.0.0.1:{port}/login/").status_code == 200
    docker.engine.call("rm", "-f", "alone")


def test_each_setting_in_the_file_arrives_with_the_documented_command(compose: Compose) -> None:
    login, ours = f"{compose.url}/login/", {"Host": "gpus.example.org", "X-Forwarded-Proto": "https"}
    assert "Continue with" not in httpx.get(login, headers={"X-Forwarded-For": "198.51.100.7"}).text
    gateway = compose.docker.engine.call(
        "network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", f"{compose.folder.name}_default"
    ).strip()
    logs = ("exec", "-T", "server", "cat", "/var/lib/dstackweb/logs/web.log")
    eventually(lambda: f"a proxy at {gateway} that".encode() in compose(*logs))
    before = compose.id()
    compose.set(
        DSTACKWEB_PUBLIC_URL="https://gpus.example.org", DSTACKWEB_ALLOWED_HOSTS=".example.org",
        DSTACKWEB_OIDC_URL="https://login.example.org/team", DSTACKWEB_OIDC_CLIENT_ID="gpus",
        DSTACKWEB_OIDC_NAME="Example", DSTACKWEB_OIDC_CLIENT_SECRET="'pa$$word$x'",
        DSTACKWEB_EMAIL_URL="smtps://me:pw@mail.example.org?from=gpus@example.org",
        DSTACKWEB_TRUSTED_PROXIES=gateway, DSTACKWEB_RUNS_DAYS=77, DSTACKWEB_STORAGE="database",
    )  # fmt: skip
    compose.up()
    assert compose.id() != before
    assert "Continue with Example" in httpx.get(login, headers=ours).text
    assert httpx.get(login, headers={**ours, "X-Forwarded-Proto": "http"}).status_code == 301
    assert compose.setting("DSTACKWEB_OIDC_CLIENT_SECRET") == "pa$$word$x"
    assert compose.setting("EMAIL_HOST") == "mail.example.org"
    assert compose.setting("DSTACKWEB_TRUSTED_PROXIES") == [f"{gateway}/32"]
    assert compose.setting("DSTACKWEB_RUNS_DAYS") == 77
    assert compose.setting("DSTACKWEB_STORAGE") == "database"
    assert compose.setting("DATABASES")["default"]["HOST"] == "postgres", "the file's is that of a server outside"
    same = compose.id()
    compose.up()
    assert compose.id() == same
