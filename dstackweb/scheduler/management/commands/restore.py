"""`dstackweb-server restore FILE`: restore a backup into this deployment, which must be stopped."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from dstackweb.lib.errors import DomainError
from dstackweb.lib.process import try_lock
from dstackweb.scheduler.processes import backup, home


class Command(BaseCommand):
    help = __doc__
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path, help="a file of `dstackweb-server backup`. -: standard input")
        parser.add_argument("--replace", action="store_true", help="replace the database that is there")

    def handle(self, *args: Any, **options: Any) -> None:
        lock = try_lock(settings.DSTACKWEB_HOME / home.LOCK_NAME)
        if lock is None:
            raise CommandError(
                "the server is running. Nothing was changed. Stop it first, and hosts of other machines."
            )
        with lock:
            try:
                if options["file"] == Path("-"):
                    with tempfile.NamedTemporaryFile(dir=settings.DSTACKWEB_HOME, prefix=".restore-") as copy:
                        shutil.copyfileobj(sys.stdin.buffer, copy)
                        copy.flush()
                        done = backup.restore(Path(copy.name), replace=options["replace"])
                else:
                    done = backup.restore(options["file"], replace=options["replace"])
            except DomainError as error:
                raise CommandError(error.detail) from None
        self.stdout.write(f"Restored the backup of {done['at']}: the database, and {done['files']} logs and archives.")
        if done["aside"]:
            self.stdout.write(f"The database before it is kept: {done['aside']}")
        if done["ended"]:
            self.stdout.write(f"Jobs that started after the backup were ended on this machine: {done['ended']}.")
        if done["alive"]:
            raise CommandError(
                f"{done['alive']} jobs that the backup doesn't know still have processes here. End them, then start."
            )
        self.stdout.write("Start the server now. Runs that were submitted after the backup are lost.")
        if done["asked"] is None:
            self.stdout.write("The backup is of an older release: runs that have started since start again.")
        else:
            self.stdout.write(
                f"Nothing is placed until its hosts ({done['asked']}) have said what was started there since, for a "
                "minute at most."
            )
