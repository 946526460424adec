"""The server's management commands: `python -m dstackweb.manage`, or `manage.py` in a checkout."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run a management command. An invalid setting ends it with one line."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dstackweb.settings")
    from django.core.management import execute_from_command_line

    from dstackweb.env import BadSetting
    from dstackweb.lib.process import die_with_supervisor

    die_with_supervisor()
    try:
        execute_from_command_line(sys.argv)
    except BadSetting as error:
        sys.exit(f"dstackweb: {error}")


if __name__ == "__main__":
    main()
