"""`dstackweb-server recount --check`: compare all stored counters with a recount, and list differences."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from dstackweb.lib.sql import snapshot
from dstackweb.runs.recount import differences


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--check", action="store_true", required=True, help="compare only; changes nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        with snapshot():
            found = list(differences())
        if found:
            raise CommandError("counters differ from a recount:\n  " + "\n  ".join(map(str, found)))
        self.stdout.write("All counters are correct.")
