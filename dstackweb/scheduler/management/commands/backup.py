"""`dstackweb-server backup FILE`: back up the deployment to a new file, while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from dstackweb.lib.errors import DomainError
from dstackweb.scheduler.processes import backup


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path, help="where to write it; must not exist")
        parser.add_argument(
            "--with-secret-key",
            action="store_true",
            help="also copy the secret key and the SSH host key: keep such a file as safe as these",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            made = backup.write(options["file"], with_key=options["with_secret_key"])
        except DomainError as error:
            raise CommandError(error.detail) from None
        self.stdout.write(
            f"{options['file']}: database ({made['database']}) and {made['files']} logs and archives, "
            f"{made['bytes'] >> 20} MiB."
        )
        if made["storage"].startswith("s3://"):
            self.stdout.write(f"Logs and code stay in {made['storage']}: back up the bucket as well.")
        if made["with_key"]:
            self.stdout.write("The file has the secret key, which gives full access to the deployment.")
        else:
            self.stdout.write(
                f"The secret key (fingerprint {made['key']}) is not in it. Keep a copy elsewhere: a restore needs it."
            )
