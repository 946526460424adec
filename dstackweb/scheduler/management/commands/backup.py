"""`dstackweb-server backup FILE`: back up the deployment to a new file, while it runs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper

from dstackweb.lib.errors import DomainError
from dstackweb.scheduler.processes import backup


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path, help="where to write it; must not exist. -: to standard output")
        parser.add_argument(
            "--with-secret-key",
            action="store_true",
            help="also copy the secret key and the SSH host key: keep such a file as safe as these",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        file, say = options["file"], self.stdout
        if file == Path("-"):
            if sys.stdout.isatty():
                raise CommandError("a backup is no text for a terminal. Nothing was written. Redirect it to a file.")
            say = OutputWrapper(sys.stderr)
            with tempfile.TemporaryDirectory(dir=settings.DSTACKWEB_HOME, prefix=".backup-") as folder:
                made = self._write(Path(folder) / "tar", options)
                with open(Path(folder) / "tar", "rb") as tar:
                    shutil.copyfileobj(tar, sys.stdout.buffer)
        else:
            made = self._write(file, options)
        place = file if say is self.stdout else "Standard output"
        say.write(
            f"{place}: database ({made['database']}) and {made['files']} logs and archives, {made['bytes'] >> 20} MiB."
        )
        if made["storage"].startswith("s3://"):
            say.write(f"Logs and code stay in {made['storage']}: back up the bucket as well.")
        if made["with_key"]:
            say.write("The file has the secret key, which gives full access to the deployment.")
        else:
            say.write(
                f"The secret key (fingerprint {made['key']}) is not in it. Keep a copy elsewhere: a restore needs it."
            )

    def _write(self, file: Path, options: dict[str, Any]) -> dict[str, Any]:
        try:
            return backup.write(file, with_key=options["with_secret_key"])
        except DomainError as error:
            raise CommandError(error.detail) from None
