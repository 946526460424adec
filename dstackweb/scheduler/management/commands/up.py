"""`manage.py up`: the whole server on one machine, until Ctrl-C."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shlex
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NoReturn

import redis
from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connections
from django.utils import timezone
from django_q.status import Stat

from dstackweb.accounts.services import Bootstrap, bootstrap
from dstackweb.backends.models import Host
from dstackweb.lib import schema
from dstackweb.lib.errors import DomainError
from dstackweb.lib.process import REFUSED, try_lock
from dstackweb.offers import sources
from dstackweb.profiles.services import ensure_default_profile
from dstackweb.scheduler.processes.supervisor import ProcessSpec, Supervisor

LOCK = "up.lock"
"""Locked by the server that uses a home directory; holds its address."""


class Command(BaseCommand):
    help = "Set up the database, then run web, workers, ticker and this machine as a host."
    requires_system_checks = ["backends"]

    def handle(self, *args: Any, **options: Any) -> None:
        began = time.monotonic()
        os.environ["DSTACKWEB_HOME"] = str(settings.DSTACKWEB_HOME)
        _lock = lock_home(settings.DSTACKWEB_HOME, settings.DSTACKWEB_API_URL)
        check_port(settings.DSTACKWEB_HOST, settings.DSTACKWEB_PORT)
        static_root = collect_static()
        admin = prepare()
        logs = settings.DSTACKWEB_HOME / "logs"
        supervisor = Supervisor(server_processes(static_root), logs, settings.BASE_DIR, self._say)

        def on_ready() -> None:
            connections.close_all()
            self.stdout.write(banner(admin, logs, time.monotonic() - began))
            self.stdout.flush()

        refused = supervisor.run(on_ready)
        self._say("stopped. Running jobs continue")
        if refused:
            sys.exit(REFUSED)

    def _say(self, line: str) -> None:
        self.stderr.write(f"dstackweb: {line}")
        self.stderr.flush()


def refuse(why: str) -> NoReturn:
    """End this process with one line that says why the server cannot start, and what to do."""
    sys.exit(f"dstackweb: {why}")


def lock_home(home: Path, address: str) -> IO[str]:
    """Lock the home directory for this server at `address` until this process ends."""
    lock = try_lock(home / LOCK)
    if lock is None:
        there = address_of(home)
        where = f" at {there}" if there else ""
        refuse(
            f"already running{where} with data in {home}. Set DSTACKWEB_HOME and DSTACKWEB_PORT to run a second server"
        )
    lock.truncate(0)
    lock.write(address)
    lock.flush()
    return lock


def address_of(home: Path) -> str:
    """The address of the server last started in this home; empty if none was."""
    try:
        return (home / LOCK).read_text()
    except OSError:
        return ""


def check_port(host: str, port: int) -> None:
    """Refuse to start unless this process can listen there."""
    where = f"port {port} of {host}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # A bind alone succeeds beside a listener on another of the machine's addresses.
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            refuse(f"{where} is in use. Stop the process that uses it, or set DSTACKWEB_PORT")
        if error.errno == errno.EACCES:
            refuse(f"{where} needs root. Set DSTACKWEB_PORT to 1024 or above")
        refuse(f"cannot listen on DSTACKWEB_HOST={host}: {error.strerror}")


def prepare() -> Bootstrap:
    """Migrate the database, create the first admin, and request fresh offers."""
    try:
        if "redis" in settings.Q_CLUSTER:
            redis.from_url(settings.Q_CLUSTER["redis"]).ping()
        # Several servers may start on one database: the first sets it up.
        with schema.alone(schema.say_on_stderr):
            call_command("migrate", interactive=False, verbosity=0)
            admin = bootstrap()
            ensure_default_profile()
            sources.preload(timezone.now())
        return admin
    except DatabaseError as error:
        refuse(f"cannot use the database: {str(error).strip().splitlines()[0]}")
    except redis.RedisError as error:
        refuse(f"cannot use Redis at REDIS_URL: {error}")
    except DomainError as error:
        refuse(error.detail)
    finally:
        connections.close_all()


def collect_static() -> Path:
    """Collect static files under hashed names, only when one has changed. Returns their folder.

    Older files stay, for pages loaded before.
    """
    root = Path(settings.STATIC_ROOT or settings.DSTACKWEB_HOME / "static")
    stamp, now = root / ".collected", _static_fingerprint()
    if not stamp.exists() or stamp.read_text() != now:
        stamp.unlink(missing_ok=True)
        done = subprocess.run(
            [*_manage("collectstatic"), "--noinput", "--verbosity=0"],
            env={**os.environ, "DSTACKWEB_STATIC_ROOT": str(root)}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            refuse(f"cannot collect static files: {done.stderr.strip().splitlines()[-1]}")
        stamp.write_text(now)
    return root


def _static_fingerprint() -> str:
    found = hashlib.sha256()
    for finder in get_finders():
        for path, storage in finder.list([]):
            info = os.stat(storage.path(path))
            found.update(f"{path} {info.st_size} {info.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _manage(*argv: str) -> list[str]:
    return [sys.executable, str(settings.BASE_DIR / "manage.py"), *argv]


def server_processes(static_root: Path) -> list[ProcessSpec]:
    """The processes of a server on one machine: web, a cluster per name in use, ticker, and this machine as a host."""
    began = timezone.now()

    def host_is_alive(_pid: int) -> bool:
        return Host.objects.filter(name=settings.DSTACKWEB_HOST_NAME, seen_at__gte=began).exists()

    gunicorn = ["-m", "gunicorn", "--config", "python:dstackweb.gunicorn_conf", "dstackweb.wsgi"]
    return [
        ProcessSpec(
            "web", [sys.executable, *gunicorn], {"DSTACKWEB_STATIC_ROOT": str(static_root)}, ready=_web_answers
        ),
        *(
            ProcessSpec(
                "workers" if name == "dstackweb" else name,
                _manage("qcluster"),
                {"Q_CLUSTER_NAME": name},
                _cluster_is_alive,
            )
            for name in sorted(set(settings.DSTACKWEB_CLUSTERS.values()))
        ),
        ProcessSpec("ticker", _manage("ticker")),
        ProcessSpec("host", _manage("host", "--embedded"), ready=host_is_alive),
    ]


def _web_answers(_pid: int) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.DSTACKWEB_HOST, settings.DSTACKWEB_HOST)
    headers = {"Host": settings.ALLOWED_HOSTS[0].lstrip(".*") or "localhost"}
    try:
        with closing(http.client.HTTPConnection(host, settings.DSTACKWEB_PORT, timeout=2)) as connection:
            connection.request("GET", "/healthz", headers=headers)
            return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def _cluster_is_alive(pid: int) -> bool:
    return any(stat.pid == pid and stat.workers for stat in Stat.get_all())


def banner(admin: Bootstrap, logs: Path, took_s: float) -> str:
    """What to print once everything answers: address, sign-in, next steps."""
    address, login = settings.DSTACKWEB_API_URL, f"`{_login_command()}` prints a sign-in link"
    if admin.password:
        sign_in = f"{admin.username} / {admin.password}   (shown only once; {login})"
    elif settings.DSTACKWEB_ADMIN_PASSWORD:
        sign_in = f"as {admin.username}, with the password in DSTACKWEB_ADMIN_PASSWORD"
    else:
        sign_in = f"as {admin.username}; {login}"
    cli = _cli()
    lines = [
        f"dstackweb is ready at {address}/ (started in {took_s:.1f} s)",
        "",
        f"  Sign in    {sign_in}",
        "  Try next   in the browser: Submit a run, pick an example",
        f"             in a shell: {cli} login {address}",
        f"                         {cli} apply -f examples/hello.yaml",
    ]
    if settings.DSTACKWEB_HOST in {"0.0.0.0", "::"} and not (
        settings.DSTACKWEB_PUBLIC_URL or settings.DSTACKWEB_ALLOWED_HOSTS
    ):
        names = ", ".join(settings.ALLOWED_HOSTS)
        lines.append(f"  Warning    requests for other names than {names} are refused. Set DSTACKWEB_PUBLIC_URL")
    return "\n".join(["", *lines, "", f"Logs: {logs}. Ctrl-C stops the server; running jobs continue.", ""])


def _login_command() -> str:
    """As another shell needs it, which does not know where this server's data is."""
    home = settings.DSTACKWEB_HOME
    return "make login" if home == settings.BASE_DIR / "var" else f"DSTACKWEB_HOME={shlex.quote(str(home))} make login"


def _cli() -> str:
    """The command line as callable from the current directory."""
    installed = Path(sys.prefix) / "bin" / "dstackweb"
    if not installed.exists():
        return "dstackweb"
    return os.path.relpath(installed) if installed.is_relative_to(Path.cwd()) else str(installed)
