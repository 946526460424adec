"""The server's management commands: `python -m dstackweb.manage`, or `manage.py` in a checkout."""

from __future__ import annotations

import os
import sys

WORKS = {"qcluster", "ticker", "host", "gateway"}
"""Commands that take work. `up` and `migrate` look at the database's version themselves."""


def main() -> None:
    """Run a management command. An invalid setting, or a database for other versions, ends it with one line."""
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
