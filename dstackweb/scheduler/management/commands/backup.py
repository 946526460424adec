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
        parser.add_argument(
            "file",
            type=Path,
            help="a new file, or a folder in which the file gets a name of its own, by the time. -: standard output",
        )
        parser.add_argument(
            "--keep",
            type=int,
            metavar="N",
            help="in a folder: afterwards remove all but the newest N of these files; none if the backup fails",
        )
        parser.add_argument(
            "--with-secret-key",
            action="store_true",
            help="also copy the secret key and the SSH host key: keep such a file as safe as these",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        file, keep, with_key, say = options["file"], options["keep"], options["with_secret_key"], self.stdout
        removed: list[Path] = []
        if keep is not None and (keep < 1 or not file.is_dir()):
            raise CommandError("--keep takes a number from 1 on, and needs a folder that exists. Nothing was written.")
        try:
            if file == Path("-"):
                if sys.stdout.isatty():
                    raise CommandError("A backup is no text. Nothing was written. Redirect it to a file.")
                say = OutputWrapper(sys.stderr)
                with tempfile.TemporaryDirectory(dir=settings.DSTACKWEB_HOME, prefix=backup.DRAFT) as folder:
                    manifest = backup.write(Path(folder) / "tar", with_key=with_key)
                    with open(Path(folder) / "tar", "rb") as tar:
                        shutil.copyfileobj(tar, sys.stdout.buffer)
            elif file.is_dir():
                file, manifest, removed = backup.write_into(file, keep=keep or 0, with_key=with_key)
            else:
                manifest = backup.write(file, with_key=with_key)
        except DomainError as error:
            raise CommandError(error.detail) from None

        place = file if say is self.stdout else "Standard output"
        say.write(
            f"{place}: database ({manifest['database']}) and {manifest['files']} logs and archives, "
            f"{manifest['bytes'] >> 20} MiB."
        )
        if removed:
            say.write(f"Removed older ones: {', '.join(path.name for path in removed)}.")
        if manifest["storage"].startswith("s3://"):
            say.write(f"Logs and code stay in {manifest['storage']}: back up the bucket as well.")
        if manifest["with_key"]:
            say.write("The file has the secret key, which gives full access to the deployment.")
        else:
            say.write(
                f"The secret key (fingerprint {manifest['key']}) is not in it. "
                "Keep a copy elsewhere: a restore needs it."
            )
