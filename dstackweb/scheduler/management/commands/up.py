"""`dstackweb-server up`: the whole server on one machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser
from django.db import Error, connections
from django.utils import timezone
from django_q.status import Stat
from gunicorn.systemd import sd_notify

from dstackweb import env
from dstackweb.accounts.bootstrap import Bootstrap, bootstrap
from dstackweb.backends.hosts import local
from dstackweb.backends.models import Host
from dstackweb.lib import bundles, latency, schema
from dstackweb.lib.commands import server_command
from dstackweb.lib.errors import DomainError
from dstackweb.lib.process import REFUSED, wait_for_lock
from dstackweb.lib.static_files import page_sources
from dstackweb.offers import sources
from dstackweb.profiles.services import ensure_default_profile
from dstackweb.scheduler.processes import home, protection
from dstackweb.scheduler.processes.home import Handover, HomeLock, running_server
from dstackweb.scheduler.processes.protection import end_jobs_on
from dstackweb.scheduler.processes.supervisor import Outcome, ProcessSpec, Supervisor

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""Between tries to set up a database that is away."""
LISTENS_ON = "DSTACKWEB_LISTENS_ON"
"""Set by a server for the program that prepares its reload: a reload cannot change the address."""
PYTHON = (sys.executable, "-P")
"""Imports nothing from the current directory, where files of the person who starts the server may be."""


class Command(BaseCommand):
    help = (
        "Set up the database, then run web, workers, ticker and this machine as a host. If that is running already, it "
        "is reloaded."
    )
    requires_system_checks = ["backends"]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--no-host", action="store_true", help="start no runs on this machine")
        parser.add_argument("--prepare", action="store_true", help="only set up the database, and end")

    def handle(self, *args: Any, **options: Any) -> None:
        began = time.monotonic()
        os.environ["DSTACKWEB_HOME"] = str(settings.DSTACKWEB_HOME)
        if options["prepare"]:
            return prepare_reload()
        # Only this process may say to systemd that it is ready: gunicorn would say so too early.
        notify = {name: os.environ.pop(name) for name in ("NOTIFY_SOCKET",) if name in os.environ}
        former = home.taken_over()
        if former is None:
            lock, listener = self._lock(), open_port(settings.DSTACKWEB_HOST, settings.DSTACKWEB_PORT)
            latency.start_counting(latency_folder())
        else:
            lock = HomeLock.taken_over(former.lock, settings.DSTACKWEB_API_URL)
            listener = socket.socket(fileno=former.listener)
        static_root = collect_static()
        admin = prepare(has_served=former is not None)
        logs = settings.DSTACKWEB_HOME / "logs"
        again = [*_manage("up"), *(["--no-host"] if options["no_host"] else [])]
        given = {**env.GIVEN, LISTENS_ON: _place()}
        supervisor = Supervisor(
            server_processes(static_root, listener.fileno(), with_host=not options["no_host"]),
            logs,
            self._say,
            preparation=([*again, "--prepare"], given),
            former=former.children if former else (),
        )
        supervisor.not_reloaded = lambda: lock.loaded("the reason is on its console")

        def on_ready() -> None:
            connections.close_all()
            if former is None:
                self.stdout.write(banner(admin, logs, time.monotonic() - began))
            else:
                self.stdout.write(f"dstackweb: reloaded in {time.monotonic() - began:.1f} s")
            self.stdout.flush()
            lock.loaded()
            os.environ.update(notify)
            sd_notify("READY=1", log, unset_environment=True)

        outcome = supervisor.run(on_ready)
        if outcome is Outcome.RELOAD:
            connections.close_all()
            what = Handover(listener.fileno(), lock.file.fileno(), supervisor.survivors())
            home.hand_over(again, given, what)
        if not local.here().has_living():
            protection.reopen_ports(settings.DSTACKWEB_HOME)
        self._say("stopped. Running jobs continue")
        if outcome is Outcome.REFUSED:
            sys.exit(REFUSED)

    def _lock(self) -> HomeLock:
        """Lock the home directory; if a server here has done so, have it reload, and end."""
        folder, address = settings.DSTACKWEB_HOME, settings.DSTACKWEB_API_URL
        lock = HomeLock.take(folder, address)
        if lock is not None:
            return lock
        there = running_server(folder)
        if there.address == address:
            self._say(f"already running at {address}; it is reloaded with the program as it is now")
            try:
                after = home.reload(folder)
            except PermissionError:
                refuse(f"no permission to reload it: it belongs to the user of process {there.pid}")
            if after is not None:
                if after.trouble:
                    refuse(f"not reloaded: {after.trouble}. The server goes on as it was")
                self._say("reloaded. It goes on where it was started, with the settings from there")
                sys.exit(0)
        where = f" at {there.address}" if there.address else ""
        second = "Set DSTACKWEB_HOME and DSTACKWEB_PORT to run a second server"
        refuse(f"already running{where} with data in {folder}. {second}")

    def _say(self, line: str) -> None:
        self.stderr.write(f"dstackweb: {line}")
        self.stderr.flush()


def refuse(why: str) -> NoReturn:
    """End this process with one line that says why the server cannot start, and what to do."""
    sys.exit(f"dstackweb: {why}")


def _place() -> str:
    return f"{settings.DSTACKWEB_HOST} {settings.DSTACKWEB_PORT}"


def open_port(host: str, port: int, tries: int = 5) -> socket.socket:
    """Listen there, or refuse to start. Requests wait from now on until the web server is ready."""
    where = f"port {port} of {host}"
    try:
        return home.listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            if tries > 1 and end_jobs_on(port, settings.DSTACKWEB_JOB_USER):
                return open_port(host, port, tries - 1)
            refuse(f"{where} is in use. Stop the process that uses it, or set DSTACKWEB_PORT")
        if error.errno == errno.EACCES:
            refuse(f"{where} needs root. Set DSTACKWEB_PORT to 1024 or above")
        refuse(f"cannot listen on DSTACKWEB_HOST={host}: {error.strerror}")


def prepare_reload() -> None:
    """What can go wrong with a new program or new settings goes wrong here, while the old processes serve."""
    if os.environ.get(LISTENS_ON, _place()) != _place():
        refuse("DSTACKWEB_HOST and DSTACKWEB_PORT change only with a restart")
    collect_static()
    prepare()
    import_module("dstackweb.wsgi")


def prepare(*, has_served: bool = False, wait: Callable[[float], object] = time.sleep) -> Bootstrap:
    """Migrate the database, create the first admin, and request fresh offers.

    A database that goes away meanwhile is waited for, also at first where the server `has_served` until now.
    """
    admin: Bootstrap | None = None
    was_reached, said = has_served, ""
    while True:
        try:
            connections["default"].ensure_connection()
            was_reached = True
            if "redis" in settings.Q_CLUSTER and not has_served:
                reach_redis(settings.Q_CLUSTER["redis"])
            if found := protection.refusal(settings.DATABASES["default"], settings.Q_CLUSTER.get("redis", "")):
                refuse(found)
            # Several servers may start on one database: the first sets it up.
            with schema.alone(schema.say_on_stderr):
                call_command("migrate", interactive=False, verbosity=0)
                admin = admin or bootstrap()  # only the call that creates the admin knows the password
                ensure_default_profile()
                sources.preload(timezone.now())
            return admin
        except Error as error:
            text = str(error).strip().partition("\n")[0]
            if not (was_reached and schema.is_lost(error)):
                refuse(f"cannot use the database: {text}")
            if text != said:
                schema.say_on_stderr(f"the database is away, will retry: {text}")
            said = text
        except DomainError as error:
            refuse(error.detail)
        finally:
            connections.close_all()
        wait(RETRY_S)


def reach_redis(url: str) -> None:
    """Refuse to start without it. Its library takes long to load, and is for deployments that use it."""
    import redis

    try:
        redis.from_url(url).ping()
    except redis.RedisError as error:
        refuse(f"cannot use Redis at REDIS_URL: {error}")


def collect_static() -> Path:
    """Collect static files under hashed names if one has changed; returns their folder. Older ones stay, for open
    pages."""
    root = Path(settings.STATIC_ROOT or settings.DSTACKWEB_HOME / "static")
    root.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(root / ".lock"):  # another server may use the same folder
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
    for source in (*page_sources(), Path(bundles.__file__)):  # whose words decide what is in them
        found.update(source.read_bytes())
    return found.hexdigest()


def _manage(*argv: str) -> list[str]:
    return [*PYTHON, "-m", "dstackweb.manage", *argv]


def _role(*argv: str) -> list[str]:
    """Checks are for developers, and load all pages: as long as the start of the process itself."""
    return _manage(*argv, "--skip-checks")


class ReadyPipe:
    """Web servers write their pid into `write` once a worker has loaded the application.

    A request would not do: a former web server may answer it, on the same socket.
    """

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        self._pids: set[int] = set()
        for end in (self._read, self.write):
            os.set_blocking(end, False)

    def has(self, pid: int) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._pids |= {int(line) for line in os.read(self._read, 65536).split()}
        return pid in self._pids


def latency_folder() -> Path:
    return Path(settings.DSTACKWEB_HOME) / "latency"


def server_processes(static_root: Path, listener: int, *, with_host: bool = True) -> list[ProcessSpec]:
    """The processes of a server: web, a cluster per name in use, ticker, and (`with_host`) this machine as a host."""
    began, web = timezone.now(), ReadyPipe()

    def host_is_alive(_pid: int) -> bool:
        return Host.objects.filter(name=settings.DSTACKWEB_HOST_NAME, seen_at__gte=began).exists()

    def unless_away(is_alive: Callable[[int], bool]) -> Callable[[int], bool]:
        """`is_alive`, or False where the database or Redis doesn't say."""

        def is_seen_alive(pid: int) -> bool:
            try:
                return is_alive(pid)
            except Exception:  # Redis's own, whose library takes long to load
                connections.close_all()
                return False

        return is_seen_alive

    gunicorn = ["-m", "dstackweb.web_server", "--config", "python:dstackweb.gunicorn_conf", "dstackweb.wsgi"]
    return [
        ProcessSpec(
            "web",
            [*PYTHON, *gunicorn],
            {
                "DSTACKWEB_STATIC_ROOT": str(static_root),
                "DSTACKWEB_LISTEN_FD": str(listener),
                "DSTACKWEB_READY_FD": str(web.write),
                latency.FOLDER: str(latency_folder()),
            },
            ready=web.has,
            files=(listener, web.write),
            serves=True,
        ),
        *(
            ProcessSpec(
                "workers" if name == settings.DSTACKWEB_CLUSTERS["control"] else name,
                _role("qcluster"),
                {"Q_CLUSTER_NAME": name},
                unless_away(_cluster_is_alive),
            )
            for name in sorted(set(settings.DSTACKWEB_CLUSTERS.values()))
        ),
        *([ProcessSpec("gateway", _role("gateway"), alone=True)] if settings.DSTACKWEB_GATEWAY_PORT else []),
        ProcessSpec("ticker", _role("ticker") if with_host else _role("ticker", "--deployment-only")),
        *([ProcessSpec("host", _role("host"), ready=unless_away(host_is_alive), alone=True)] if with_host else []),
    ]


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
    cli, example = _program("dstackweb"), _from_here(settings.ASSETS_DIR / "examples" / "hello.yaml")
    lines = [
        f"dstackweb is ready at {address}/ (started in {took_s:.1f} s)",
        "",
        f"  Sign in    {sign_in}",
        "  Try next   in the browser: Submit a run, pick an example",
        f"             in a shell: {cli} login {address}",
        f"                         {cli} apply -f {example}",
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
    command = server_command("login_link") if settings.IS_CHECKOUT else f"{_program('dstackweb-server')} login_link"
    is_known = settings.IS_CHECKOUT and home == settings.ASSETS_DIR / "var"
    return command if is_known else f"DSTACKWEB_HOME={shlex.quote(str(home))} {command}"


def _program(name: str) -> str:
    """A program of this installation, as callable from the current directory."""
    installed = Path(sys.prefix) / "bin" / name
    return name if shutil.which(name) == str(installed) or not installed.exists() else _from_here(installed)


def _from_here(path: Path) -> str:
    return shlex.quote(os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path))
