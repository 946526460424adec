"""`manage.py up`: the whole server on one machine, until Ctrl-C."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import connections

from dstackweb.accounts.services.bootstrap import Bootstrap
from dstackweb.scheduler.processes import startup
from dstackweb.scheduler.processes.supervisor import Supervisor


class Command(BaseCommand):
    help = "Set up the database, then run web, workers, ticker and this machine as a host."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        began = time.monotonic()
        os.environ["DSTACKWEB_HOME"] = str(settings.DSTACKWEB_HOME)
        try:
            _held = startup.lock_home(settings.DSTACKWEB_HOME, settings.DSTACKWEB_API_URL)
            startup.check_port(settings.DSTACKWEB_HOST, settings.DSTACKWEB_PORT)
            static_root = startup.collect_static()
            made = startup.prepare()
        except startup.CannotStart as error:
            sys.exit(f"dstackweb: {error}")
        logs = settings.DSTACKWEB_HOME / "logs"
        supervisor = Supervisor(startup.server_processes(static_root), logs, settings.BASE_DIR, self._say)

        def on_ready() -> None:
            connections.close_all()
            self.stdout.write(banner(made, logs, time.monotonic() - began))
            self.stdout.flush()

        supervisor.run(on_ready)
        self._say("stopped. Running jobs continue")

    def _say(self, line: str) -> None:
        self.stderr.write(f"dstackweb: {line}")
        self.stderr.flush()


def banner(made: Bootstrap, logs: Path, took_s: float) -> str:
    """What to print once everything answers: address, sign-in, next steps."""
    address = settings.DSTACKWEB_API_URL
    if made.password:
        sign_in = f"{made.username} / {made.password}   (shown only once; `make login` prints a sign-in link)"
    elif settings.DSTACKWEB_ADMIN_PASSWORD:
        sign_in = f"as {made.username}, with the password in DSTACKWEB_ADMIN_PASSWORD"
    else:
        sign_in = f"as {made.username}; `make login` prints a sign-in link"
    cli = _cli()
    lines = [
        f"dstackweb is ready at {address}/ (started in {took_s:.1f} s)",
        "",
        f"  Sign in    {sign_in}",
        "  Try next   in the browser: Submit a run, pick an example",
        f"             in a shell: {cli} login {address}",
        f"                         {cli} apply -f examples/hello.yaml",
    ]
    if settings.DSTACKWEB_HOST in {"0.0.0.0", "::"} and not (
        settings.DSTACKWEB_PUBLIC_URL or settings.DSTACKWEB_ALLOWED_HOSTS
    ):
        names = ", ".join(settings.ALLOWED_HOSTS)
        lines.append(f"  Warning    only {names} are answered. Set DSTACKWEB_PUBLIC_URL to the address that people use")
    return "\n".join(["", *lines, "", f"Logs: {logs}. Ctrl-C stops the server; running jobs continue.", ""])


def _cli() -> str:
    """The command line as callable from the current directory."""
    installed = Path(sys.prefix) / "bin" / "dstackweb"
    if not installed.exists():
        return "dstackweb"
    return os.path.relpath(installed) if installed.is_relative_to(Path.cwd()) else str(installed)
