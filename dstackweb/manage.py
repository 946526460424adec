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


def main() -> None:
    """Run a management command. An invalid setting, or a database for other versions, ends it with one line."""
    if sys.argv[1:] in (["--version"], ["version"]):
        sys.stdout.write(f"dstackweb {dstackweb.__version__}\n")
        return
    if not all(map(find_spec, OF_THE_SERVER)):
        sys.exit("dstackweb: only the command line is installed; the server is in pip install 'dstackweb[server]'")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dstackweb.settings")
    from django.core.management import execute_from_command_line

    from dstackweb.env import BadSetting
    from dstackweb.lib.process import die_with_supervisor

    die_with_supervisor()
    try:
        if sys.argv[1:2] and sys.argv[1] in WORKS and "--help" not in sys.argv:
            _require_schema()
        execute_from_command_line(sys.argv)
    except BadSetting as error:
        sys.exit(f"dstackweb: {error}")


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
