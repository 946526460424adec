"""`dstackweb-server host`: makes the server's own machine a host, with a heartbeat every second.

The server's workers start its jobs. Other machines join with `dstackweb host join`, which runs an agent there.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from dstackweb.backends.hosts import local
from dstackweb.backends.hosts.inventory import HasLeft, heartbeat, register
from dstackweb.backends.models import Host, Ports
from dstackweb.lib import schema
from dstackweb.lib.process import REFUSED
from dstackweb.runner import machine
from dstackweb.runner.isolation import Arrangement, arrange, prepare
from dstackweb.runner.machine import BackgroundProbe, Probe, boot_id, probe
from dstackweb.scheduler.processes.protection import close_ports
from dstackweb.spec.labels import read_pair

log = logging.getLogger(__name__)

HEARTBEAT_EVERY_S = 1.0
NAME_CHECK_S = 3.0
"""How long to wait for another machine's heartbeat under the same name."""


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--address", help="address for other nodes of a run; default: as the server sees it")
        parser.add_argument(
            "--label",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="label that runs can request; repeatable; labels set elsewhere stay",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        name = settings.DSTACKWEB_HOST_NAME
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        try:
            labels = dict(read_pair(text) for text in options["label"])
        except ValueError as error:
            raise CommandError(str(error)) from error
        if name_in_use(name, stopping.wait):
            raise CommandError(f"another machine is running as host {name}. Set another DSTACKWEB_HOST_NAME")
        if not local.take_heartbeats():
            log.warning("host %s: its runners send their heartbeats one by one", name)
        address = options["address"] or machine.address(settings.DSTACKWEB_API_URL) or "127.0.0.1"
        ports = close_ports(
            settings.DSTACKWEB_HOME, settings.DSTACKWEB_JOB_USER, settings.DATABASES["default"], settings.REDIS_URL,
            settings.DSTACKWEB_PORT, settings.DSTACKWEB_GATEWAY_PORT, settings.DSTACKWEB_SSH_PORT,
        )  # fmt: skip
        presence = HostPresence(name, address, settings.DSTACKWEB_CLUSTERS["control"], ports, labels)
        background_probe = BackgroundProbe(_probe)
        try:
            while not stopping.is_set():
                presence.update(background_probe.current())
                if schema.refusal():
                    sys.exit(REFUSED)
                stopping.wait(HEARTBEAT_EVERY_S)
        except HasLeft:
            self.stdout.write(f"Host {name} was removed from the deployment. Start it again to rejoin.")


def _probe() -> Probe:
    return probe(local.here().is_ours, engine=local.engine().current()[1])


@dataclass
class HostPresence:
    """Keeps this machine's row up to date: everything when something changed, else a heartbeat."""

    name: str
    address: str
    cluster: str
    ports: Ports = Ports.NONE
    labels: Mapping[str, str] = field(default_factory=dict)
    host: Host | None = None
    written: tuple[Probe, Arrangement] | None = None

    def update(self, seen: Probe | None) -> None:
        """Write what is due. Database errors are logged and retried. Raises HasLeft."""
        if seen is None:
            return
        seen = replace(seen, engine=local.engine().report(seen.engine))
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
                    ports=self.ports,
                )
                self.written = seen, arrangement
        except (DatabaseError, InterfaceError) as error:
            log.warning("host %s: database error, will retry: %s", self.name, error)
            connection.close()


def _arrangement() -> Arrangement:
    return prepare(
        arrange(
            settings.DSTACKWEB_HOME,
            uid=os.getuid(),
            job_user=settings.DSTACKWEB_JOB_USER,
            shared_uid=settings.DSTACKWEB_SHARED_UID,
        )
    )


def name_in_use(name: str, wait: Callable[[float], object]) -> bool:
    """Whether another machine sends heartbeats under this name: two would overwrite each other. `wait` sleeps."""
    others = Host.objects.filter(name=name).exclude(boot_id__in=["", boot_id()])
    before = others.values_list("heartbeats", flat=True).first()
    if before is None:
        return False
    wait(NAME_CHECK_S)
    after = others.values_list("heartbeats", flat=True).first()
    return after is not None and after != before
