"""`dstackweb-server login_link`: signs a user in without a password."""

from __future__ import annotations

import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from dstackweb.accounts.bootstrap import first_admin
from dstackweb.accounts.models import User
from dstackweb.accounts.services import make_login_link, reset_second_step
from dstackweb.lib.commands import server_command
from dstackweb.lib.errors import DomainError
from dstackweb.scheduler.processes.home import running_server


class Command(BaseCommand):
    help = "Print a link that signs a user in once, within 15 minutes."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--user", help="username; default: the first admin")
        parser.add_argument("--reset-two-step", action="store_true", help="also turn their two-step sign-in off")

    def handle(self, *args: Any, user: str | None, reset_two_step: bool, **options: Any) -> str:
        start = f"Start the server with `{server_command('up')}`"
        try:
            person = User.objects.filter(username=user).first() if user else first_admin()
            if person is None:
                sys.exit(f"dstackweb: {f'no user {user}' if user else f'no admin yet. {start}'}")
            if reset_two_step:
                reset_second_step(person)
            # The server may run with another port than this command's environment says.
            address = running_server(settings.DSTACKWEB_HOME).address or settings.DSTACKWEB_API_URL
            return f"{address}/login/{make_login_link(person)}/"
        except DomainError as error:
            sys.exit(f"dstackweb: {error.detail}")
