"""`dstackweb-server prune`: prune old data now, to the end; with `--dry-run` only say how much there is."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.utils import timezone

from dstackweb.backends.models import Host
from dstackweb.scheduler import hosts
from dstackweb.scheduler.models import RetentionKind
from dstackweb.scheduler.processes import retention


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--dry-run", action="store_true", help="only say how much waits; change nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        now, host = timezone.now(), settings.DSTACKWEB_HOST_NAME
        found = dict(retention.due(now))
        here = Host.joined.filter(name=host).exists()
        if here:
            found[RetentionKind.JOB_FILES] = len(hosts.old_job_files(host))
            found[RetentionKind.RUN_DIRS] = len(hosts.old_run_dirs(host)[1])
        for kind, number in found.items():
            more = " or more" if number >= retention.MOST_COUNTED else ""
            self.stdout.write(f"{kind.replace('_', ' ')}: {number}{more}")
        if options["dry_run"]:
            self.stdout.write("Nothing was changed.")
            return
        retention.prune(now, budget_s=None)
        if here:
            hosts.remove_old_files(host, budget_s=None)
        self.stdout.write("All of it was pruned.")
