"""`manage.py login_link`: how an admin gets in when the password is lost."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from dstackweb.accounts.models import User
from dstackweb.accounts.services import first_admin, make_login_link
from dstackweb.lib.errors import DomainError


class Command(BaseCommand):
    help = "Print a fresh link that signs its user in once, within 15 minutes."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--user", help="whom it signs in; the first admin if not given")

    def handle(self, *args: Any, user: str | None, **options: Any) -> str:
        person = User.objects.filter(username=user).first() if user else first_admin()
        if person is None:
            raise CommandError(f"no user is called {user}" if user else "there is no admin yet: start the server first")
        try:
            return f"{settings.DSTACKWEB_API_URL}/login/{make_login_link(person)}/"
        except DomainError as error:
            raise CommandError(error.detail) from None
