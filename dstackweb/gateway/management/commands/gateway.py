"""`manage.py gateway`: the way for people to their dev environments, by SSH and by pages."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from django.core.management.base import BaseCommand

from dstackweb.gateway.server import serve
from dstackweb.lib.process import REFUSED


class Command(BaseCommand):
    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        if not asyncio.run(serve()):
            sys.exit(REFUSED)
