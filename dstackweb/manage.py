"""The server's management commands: `dstackweb-server`, or `manage.py` in a checkout."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import dstackweb

WORKS = {"qcluster", "ticker", "host", "gateway"}
"""Commands that take work. `up` and `migrate` look at the database's version themselves."""
OF_THE_SERVER = ("django", "csp", "gunicorn")
"""A few modules of the extra `server`, that hardly anything else installs together."""

HELP = """\
Usage: dstackweb-server COMMAND

  up                  start the server, or reload the one that is running
  login_link          print a link that signs an admin in once
  createsuperuser     make a further admin
  changepassword NAME set a user's password
  backup FILE         back up the deployment, while it runs
  restore FILE        restore a backup into a stopped deployment
  check --deploy      say which settings are unsafe
  recount --check     compare the stored counters with a recount
  prune               delete old data now
  give_up RUN_ID      end the jobs of a run whose host is gone for good
  copy_storage FROM   copy logs, code and artifacts to another storage

`dstackweb-server help COMMAND` shows the options of a command, `dstackweb-server help --commands` lists all commands.
Settings are environment variables; DSTACKWEB_HOME is the folder with the data, ./var by default.
"""


def main() -> None:
    """Run a management command. An invalid setting, no database, or one for other versions, ends it with one line."""
    if sys.argv[1:] in (["--version"], ["version"]):
        sys.stdout.write(f"dstackweb {dstackweb.__version__}\n")
        return
    if sys.argv[1:] in ([], ["help"], ["--help"], ["-h"]):
        sys.stdout.write(HELP)
        return
    if not all(map(find_spec, OF_THE_SERVER)):
        sys.exit("dstackweb: only the command line is installed; the server is in pip install 'dstackweb[server]'")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dstackweb.settings")
    from django.core.management import execute_from_command_line
    from django.db import Error, connection

    from dstackweb.env import BadSetting
    from dstackweb.lib.process import die_with_supervisor

    die_with_supervisor()
    try:
        if sys.argv[1:2] and sys.argv[1] in WORKS and "--help" not in sys.argv:
            _require_schema()
        execute_from_command_line(sys.argv)
    except BadSetting as error:
        sys.exit(f"dstackweb: {error}")
    except Error as error:
        from dstackweb.lib import schema

        try:
            tables = [] if (is_lost := schema.is_lost(error)) else connection.introspection.table_names()
        except Error:
            is_lost = True
        if is_lost:
            # It may have gone away in the middle: what was committed before stays.
            sys.exit(f"dstackweb: the database can't be reached: {error}\nRun this again once it answers.")
        if "django_migrations" in tables:
            raise
        from django.conf import settings

        from dstackweb.lib.commands import server_command

        start = f"Start the server with `{server_command('up')}`"
        sys.exit(f"dstackweb: no database in {settings.DSTACKWEB_HOME} yet. {start}")


def _require_schema() -> None:
    import django

    django.setup()
    from dstackweb.lib import schema
    from dstackweb.lib.process import REFUSED

    try:
        schema.require()
    except schema.Refused as why:
        schema.say_on_stderr(str(why))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
