"""`dstackweb-server ticker`: enqueues periodic work when it is due, for the deployment and for this machine."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.db import OperationalError, close_old_connections
from django.utils import timezone

from dstackweb.lib import schema
from dstackweb.lib.process import REFUSED
from dstackweb.scheduler.processes import tasks

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.25


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--deployment-only", action="store_true", help="enqueue no work on this machine")

    def handle(self, *args: Any, **options: Any) -> None:
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        jobs = [] if options["deployment_only"] else tasks.host_jobs(settings.DSTACKWEB_HOST_NAME)
        jobs += tasks.control_jobs()
        known = False
        while not stopping.wait(CHECK_EVERY_S):
            if schema.refusal():
                sys.exit(REFUSED)
            try:
                if not known:
                    tasks.ensure_rows(jobs)
                    known = True
                tasks.enqueue_due(jobs, timezone.now())
            except OperationalError as error:
                # Work that is due stays due until the database is back.
                log.warning("ticker: database error, will retry: %s", error)
                close_old_connections()
            except Exception:
                log.exception("ticker: cannot enqueue, will retry")
                close_old_connections()
