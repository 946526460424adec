"""A notice when the server is newer than this command."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from typing import Any

import dstackweb
from dstackweb.cli import config
from dstackweb.cli.language import _
from dstackweb.cli.output import GIVEN, CliError, note

VERSION_HEADER = "X-Dstackweb-Version"
"""What the server sends to signed-in clients."""


def notice(url: str, version: str) -> None:
    """Say on stderr that the server has a newer version: once a day and server, and only to people at a terminal."""
    if not is_newer(version, dstackweb.__version__) or not sys.stderr.isatty() or GIVEN.get("form") == "--json":
        return
    path, today = config.config_path().with_name("notices.json"), f"{datetime.now(UTC):%Y-%m-%d}"
    try:
        noted: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        noted = {}
    if noted.get(url) == today:
        return
    try:
        config.write_private(path, [json.dumps({**noted, url: today})])
    except CliError:
        return  # without a note of the day it would be said each time
    note(
        _(
            "{url} has the newer version {version}; this command is {mine}. Update it to use what is new.",
            url=url,
            version=version,
            mine=dstackweb.__version__,
        )
    )


def is_newer(one: str, other: str) -> bool:
    """Whether a version has larger numbers than another. False for text that is no version."""
    numbers = [tuple(map(int, found[0].split("."))) if (found := _NUMBERS.match(text)) else () for text in (one, other)]
    return numbers[0] > numbers[1] != ()


_NUMBERS = re.compile(r"\d{1,9}(\.\d{1,9}){0,3}")
