"""`dstackweb-server migrate`: Django's, by one process at a time, and fenced against older programs (`lib.schema`)."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.commands import migrate
from django.db import DatabaseError

from dstackweb.lib import schema
from dstackweb.lib.process import REFUSED


class Command(migrate.Command):
    def handle(self, *args: Any, **options: Any) -> None:
        """Migrate; a program that is too old for the database refuses."""
        if options["plan"] or options["check_unapplied"]:
            super().handle(*args, **options)
            return
        whole = not options["app_label"]
        with schema.alone(schema.say_on_stderr):
            try:
                schema.fence(schema.say_on_stderr)
            except schema.Refused as why:
                schema.say_on_stderr(str(why))
                sys.exit(REFUSED)
            try:
                super().handle(*args, **options)
            except DatabaseError as error:
                if schema.is_lost(error):  # what is missing is made with the next try
                    raise
                schema.say_on_stderr(schema.unfinished(error))
                sys.exit(REFUSED)
            if whole:
                schema.record()
