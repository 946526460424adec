"""`manage.py host`: runs this machine as a host of the deployment, with a heartbeat every second.

Needs the deployment's DATABASE_URL (PostgreSQL), REDIS_URL if it has one, DSTACKWEB_SECRET_KEY and
DSTACKWEB_PUBLIC_URL: `dstackweb host join` sets them all. Workers use the database and the broker, jobs the API.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import httpx
import redis
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from django.db.migrations.executor import MigrationExecutor

from dstackweb.backends.hosts import local
from dstackweb.backends.hosts.inventory import HasLeft, heartbeat, register
from dstackweb.backends.hosts.isolation import Arrangement, arrange, prepare
from dstackweb.backends.hosts.joining import host_token
from dstackweb.backends.hosts.probe import BackgroundProbe, Probe, boot_id, own_address, probe
from dstackweb.backends.models import Host, check_host_name
from dstackweb.lib import schema
from dstackweb.lib.network import is_exposed
from dstackweb.lib.process import PARENT_VARIABLE, REFUSED, try_lock
from dstackweb.spec.labels import read_pair

log = logging.getLogger(__name__)

HEARTBEAT_EVERY_S = 1.0
NAME_CHECK_S = 3.0
"""How long to wait for another machine's heartbeat under the same name."""
HELLO_S = 5.0
STOP_S = 15.0
"""How long the host's workers may take to finish their step."""


class NotReady(CommandError):
    """Why this machine cannot be a host yet and what to do, in one line."""


class ApiUnreachable(NotReady):
    """The API does not answer now; it may later."""


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--name", default=settings.DSTACKWEB_HOST_NAME, help="default: DSTACKWEB_HOST_NAME")
        parser.add_argument("--address", help="address for other nodes of a run; default: as the server sees it")
        parser.add_argument(
            "--label",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="label that runs can request; repeatable; labels set elsewhere stay",
        )
        parser.add_argument(
            "--embedded", action="store_true", help="run on the server's own machine, with the server's workers"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        name, embedded = options["name"], options["embedded"]
        try:
            check_host_name(name)
        except ValueError as error:
            raise CommandError(f"--name: {error}") from error
        cluster = settings.DSTACKWEB_CLUSTERS["control"] if embedded else f"host-{name}"
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        try:
            labels = dict(read_pair(text) for text in options["label"])
        except ValueError as error:
            raise CommandError(str(error)) from error
        lock = None if embedded else lock_home(settings.DSTACKWEB_HOME)
        if not embedded:
            check_ready(name)
        if name_in_use(name, stopping.wait):
            raise CommandError(f"another machine is running as host {name}. Choose another --name")
        if not local.take_heartbeats():
            log.warning("host %s: its runners send their heartbeats one by one", name)
        presence = HostPresence(name, options["address"] or own_address(settings.DSTACKWEB_API_URL), cluster, labels)
        ticker = ["ticker", "--host", name, "--cluster", cluster, "--host-only"]
        commands = [] if embedded else [["qcluster"], ticker]
        children = [HostProcess(command, name, cluster) for command in commands]
        background_probe = BackgroundProbe(_probe if embedded else lambda: _probe_with_api(name))
        try:
            while not stopping.is_set():
                for child in children:
                    child.keep()
                presence.update(background_probe.current())
                if schema.refusal():
                    sys.exit(REFUSED)
                stopping.wait(HEARTBEAT_EVERY_S)
        except HasLeft:
            self.stdout.write(f"Host {name} was removed from the deployment. Start it again to rejoin.")
        finally:
            for child in children:
                child.stop()
            if lock is not None:
                lock.close()


def _probe() -> Probe:
    return probe(local.is_ours)


def _probe_with_api(name: str) -> Probe:
    """The machine's probe, with an error when it cannot use the server's API."""
    seen, trouble = _probe(), api_error(name)
    return replace(seen, error="; ".join(filter(None, [seen.error, trouble])))


@dataclass
class HostPresence:
    """Keeps this machine's row up to date: everything when something changed, else a heartbeat."""

    name: str
    address: str
    cluster: str
    labels: Mapping[str, str] = field(default_factory=dict)
    host: Host | None = None
    written: tuple[Probe, Arrangement] | None = None

    def update(self, seen: Probe | None) -> None:
        """Write what is due. Database errors are logged and retried. Raises HasLeft."""
        if seen is None:
            return
        try:
            close_old_connections()
            arrangement = _arrangement()
            if self.host is None or (seen, arrangement) != self.written or not heartbeat(self.host):
                self.host = register(
                    self.name,
                    address=self.address,
                    cluster=self.cluster,
                    probe=seen,
                    arrangement=arrangement,
                    starting=self.host is None,
                    labels=self.labels,
                )
                self.written = seen, arrangement
        except (DatabaseError, InterfaceError) as error:
            log.warning("host %s: database error, will retry: %s", self.name, error)
            connection.close()


@dataclass
class HostProcess:
    """One of the host's own processes: restarted when it ends, stopped with this one."""

    command: list[str]
    host: str
    cluster: str
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def keep(self) -> None:
        """Start it unless it is running."""
        if self.process is not None:
            if self.process.poll() is None:
                return
            log.warning(
                "host %s: %s ended with exit code %s, restarting", self.host, self.command[0], self.process.returncode
            )
        env = {
            **os.environ,
            PARENT_VARIABLE: str(os.getpid()),
            "DSTACKWEB_HOST_NAME": self.host,
            "Q_CLUSTER_NAME": self.cluster,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(settings.BASE_DIR), os.environ.get("PYTHONPATH", "")])),
        }
        self.process = subprocess.Popen([sys.executable, "-m", "dstackweb.manage", *self.command], env=env)

    def stop(self) -> None:
        """Let it finish its step, for STOP_S at most: each is safe to cut off."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _arrangement() -> Arrangement:
    return prepare(
        arrange(
            settings.DSTACKWEB_HOME,
            uid=os.getuid(),
            job_user=settings.DSTACKWEB_JOB_USER,
            shared_uid=settings.DSTACKWEB_SHARED_UID,
        )
    )


def lock_home(home: Path) -> IO[str]:
    """Lock the home directory for this host until the returned file is closed. Raises NotReady."""
    lock = try_lock(home / "host.lock")
    if lock is None:
        raise NotReady(f"another host uses {home}. Set DSTACKWEB_HOME to run a second one")
    return lock


def name_in_use(name: str, wait: Callable[[float], object]) -> bool:
    """Whether another machine sends heartbeats under this name: two would overwrite each other. `wait` sleeps."""
    others = Host.objects.filter(name=name).exclude(boot_id__in=["", boot_id()])
    before = others.values_list("heartbeats", flat=True).first()
    if before is None:
        return False
    wait(NAME_CHECK_S)
    after = others.values_list("heartbeats", flat=True).first()
    return after is not None and after != before


def check_ready(name: str) -> None:
    """Raise NotReady unless this machine can be the host `name`. An unreachable API is no obstacle: it comes back."""
    _check_database()
    _check_redis()
    with contextlib.suppress(ApiUnreachable):
        _check_api(name)


def api_error(name: str) -> str:
    """Why runners here cannot use the API, in one line; empty when they can."""
    try:
        _check_api(name)
    except NotReady as trouble:
        return str(trouble)
    return ""


def _check_database() -> None:
    if not settings.DATABASE_URL:
        raise NotReady(
            "DATABASE_URL is not set: a host needs the deployment's PostgreSQL. Run the `dstackweb host join` command "
            "from the hosts page, which sets it"
        )
    try:
        connection.ensure_connection()
        behind = MigrationExecutor(connection).migration_plan(MigrationExecutor(connection).loader.graph.leaf_nodes())
    except DatabaseError as error:
        first = str(error).strip().splitlines()[0]
        raise NotReady(f"cannot use the database in DATABASE_URL: {first}") from error
    if behind:
        raise NotReady(
            f"the database in DATABASE_URL lacks migration {behind[0][0]}. Upgrade and start the server first, and "
            "check that it uses the same database"
        )


def _check_redis() -> None:
    if "redis" not in settings.Q_CLUSTER:
        return
    try:
        redis.from_url(settings.Q_CLUSTER["redis"]).ping()
    except redis.RedisError as error:
        raise NotReady(f"cannot use Redis at REDIS_URL: {error}") from error


def _check_api(name: str) -> None:
    url = settings.DSTACKWEB_API_URL
    if is_exposed(url) and not settings.DSTACKWEB_INSECURE_HTTP:
        raise NotReady(
            f"{url} is not encrypted, so runners send no token there. Set DSTACKWEB_PUBLIC_URL to the server's "
            "https:// address, or DSTACKWEB_INSECURE_HTTP=1 on a trusted network"
        )
    token = host_token(name)
    try:
        answer = httpx.get(f"{url}/api/v1/hosts/hello", headers={"Authorization": f"Bearer {token}"}, timeout=HELLO_S)
        facts = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        why = str(error) or type(error).__name__
        raise ApiUnreachable(
            f"cannot reach the API at {url}: {why}. Jobs need it; check DSTACKWEB_PUBLIC_URL"
        ) from error
    if answer.status_code == 403:
        raise NotReady(f"the server at {url} has a different DSTACKWEB_SECRET_KEY. Set the same key on this machine")
    if not answer.is_success or not isinstance(facts, dict) or facts.get("host") != name:
        raise ApiUnreachable(f"{url} is not a dstackweb server. Check DSTACKWEB_PUBLIC_URL")
