"""What the shell offers after Tab: names from the server, and those of saved servers.

Only what the server answers within a second; without an answer, nothing. Nothing is printed. zsh evaluates what it is
offered, so that a server could run commands here: no text has a sign that a shell reads as more than text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dstackweb.cli.language import _, run_count, word

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

Completion = Callable[[str], list[tuple[str, str]]]
"""Names that begin so, each with what it is."""
MOST = 100
"""Runs that are looked through, the newest first."""
PATIENCE_S = 1.0
_NAME = re.compile(r"[\w.:-]+")
_SIGNS = re.compile(r"[^\w .:/-]")


def run_names(incomplete: str) -> list[tuple[str, str]]:
    """Runs whose name starts so, the newest first, each with its status."""
    runs = _items(lambda api: api.get(api.in_project("runs"), q=incomplete or None, limit=MOST))
    names: dict[str, str] = {}
    for run in runs:
        names.setdefault(run["name"], word(run["status"]))  # a name means its newest run
    return _matching(names.items(), incomplete)


def sweep_names(incomplete: str) -> list[tuple[str, str]]:
    names: dict[str, str] = {}
    for sweep in _items(lambda api: api.get(api.in_project("sweeps"), limit=MOST)):
        names.setdefault(sweep["name"], run_count(sweep["size"]))
    return _matching(names.items(), incomplete)


def _names(path: Callable[[Api], str], about: Callable[[dict[str, Any]], str]) -> Completion:
    def names(incomplete: str) -> list[tuple[str, str]]:
        return _matching(((row["name"], about(row)) for row in _items(lambda api: api.get(path(api)))), incomplete)

    return names


queue_names = _names(lambda api: api.in_project("queues"), lambda queue: _("{n:,} waiting", n=queue["submitted"]))
view_names = _names(lambda api: api.in_project("views"), itemgetter("query"))
host_names = _names(lambda api: api.path("hosts"), lambda host: _("online") if host["online"] else _("offline"))
project_names = _names(lambda api: api.path("projects"), lambda project: word(project["role"]))


def server_names(incomplete: str) -> list[tuple[str, str]]:
    from dstackweb.cli import config
    from dstackweb.cli.output import CliError

    try:
        servers = config.stored().servers
    except CliError:
        return []
    return _matching(((name, server.url) for name, server in servers.items()), incomplete)


def _matching(found: Iterable[tuple[str, str]], incomplete: str) -> list[tuple[str, str]]:
    return [
        (name, _SIGNS.sub("", about)) for name, about in found if name.startswith(incomplete) and _NAME.fullmatch(name)
    ]


def _items(ask: Callable[[Api], Any]) -> Iterator[dict[str, Any]]:
    """The items of one list. None where the server can't be asked: a Tab must not print an error."""
    from dstackweb.cli import config
    from dstackweb.cli.output import CliError

    try:
        page = ask(config.connect(patience_s=PATIENCE_S))
    except CliError:
        return
    yield from page["items"]
