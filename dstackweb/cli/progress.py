"""`dstackweb progress`: how far a run's tasks are, or a project's runs, by the prefix of their names, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.errors import TryLater, Unreachable, UsageError
from dstackweb.cli.output import Column, age_text, clean, note, show_json, show_table
from dstackweb.cli.progress_bars import drawn, groups_table, summary, table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from dstackweb.cli.client import Api

ENDED = ("done", "failed", "terminated")
PAGE = 500
AROUND = 8
"""Lines of a terminal that the table's rows leave to the rest."""
HOW = "Its program can tell of them by lines such as  ::task key=train-17 state=done  or by dstackweb.tracking."


def progress(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's tasks; without it the project's runs.")] = "",
    groups: Annotated[str, typer.Option(metavar="PREFIX", help="The groups of one prefix; once.")] = "",
    failed: Annotated[
        bool, typer.Option("--failed", help="The tasks that failed and why, or such groups; once.")
    ] = False,
    find: Annotated[str, typer.Option(metavar="TEXT", help="Only names with this in them.")] = "",
    attempt: Annotated[int | None, typer.Option(min=1, help="Which attempt, instead of the newest.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many groups or failed tasks at most.")] = 50,
    once: Annotated[bool, typer.Option("--once", help="Print it once instead of going on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As the API gives it, for scripts; once.")] = False,
) -> None:
    """Show how many tasks are done, failed, running, …, how fast it goes and what is left, live. Ctrl-C ends it."""
    from dstackweb.cli.client import Api

    api = Api(config.load())
    base = api.in_project("runs", run, "progress") if run else api.in_project("progress")
    asked: dict[str, Any] = {"attempt": attempt} if run else {}
    if attempt and not run:
        raise UsageError("--attempt is a run's: name the run.")
    if groups:
        only = {"only": "failed"} if failed else {}
        page = pages(api, f"{base}/groups", limit, prefix=groups, find=find, **only, **asked)
        _show(page, as_json, ("no group of it has failed tasks." if failed else "it has no such group."), show_groups)
    elif failed and not run:
        raise UsageError("tasks that failed are a run's: name the run.", "Runs that failed: dstackweb ps -a")
    elif failed:
        page = pages(api, f"{base}/failures", limit, **asked)
        _show(page, as_json, "no task has failed.", show_failures)
    elif as_json:
        show_json(whole(api, base, find=find, **asked))
    elif once or not sys.stdout.isatty():
        show_once(whole(api, base, find=find, **asked))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        room = max(1, console.height - AROUND)
        told = api.get(base, find=find, limit=min(PAGE, room), **asked)
        # By id: a newer run may take the name.
        path = api.in_project("runs", told["id"], "progress") if run else base
        watch(api, path, {"find": find, "limit": min(PAGE, room), **asked}, told, console)


def whole(api: Api, path: str, **asked: Any) -> dict[str, Any]:
    """All prefixes, which are 2,000 at most."""
    told: dict[str, Any] = api.get(path, limit=PAGE, **asked)
    while told["next"]:
        more = api.get(path, limit=PAGE, cursor=told["next"], **asked)
        told["prefixes"] += more["prefixes"]
        told["next"] = more["next"]
    return told


def pages(api: Api, path: str, limit: int, **asked: Any) -> dict[str, Any]:
    """So many items of a list, and where it goes on."""
    told: dict[str, Any] = {"items": [], "next": ""}
    while told["next"] is not None and len(told["items"]) < limit:
        more = api.get(path, limit=min(PAGE, limit - len(told["items"])), cursor=told["next"], **asked)
        told = {"items": told["items"] + more["items"], "next": more["next"]}
    return told


def _show(page: dict[str, Any], as_json: bool, nothing: str, show: Callable[[Sequence[dict[str, Any]]], None]) -> None:
    if as_json:
        show_json(page)
    elif not page["items"]:
        note(nothing.capitalize())
    else:
        show(page["items"])
        if page["next"]:
            note(f"The first {len(page['items'])}; more with --limit.")


def show_groups(items: Sequence[dict[str, Any]]) -> None:
    """A line for each group."""
    show_table(*groups_table(items, everything=not sys.stdout.isatty()))


def show_failures(items: Sequence[dict[str, Any]]) -> None:
    """A line for each task that failed, newest first."""
    columns = [Column("TASK"), Column("PREFIX"), Column("AGO", right=True), Column("MESSAGE", wide=True)]
    show_table(columns, [(item["key"], item["prefix"], age_text(item["at"]), item["message"]) for item in items])


def show_once(told: dict[str, Any]) -> None:
    """The totals, and all prefixes."""
    for line in summary(told):
        typer.echo(line)
    if tells_nothing(told):
        note(HOW)
    elif told["prefixes"] and sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False)
        console.print(drawn(told["prefixes"], console.width))
    elif told["prefixes"]:
        show_table(*table(told["prefixes"], None))


def watch(
    api: Api,
    path: str,
    asked: dict[str, Any],
    told: dict[str, Any],
    console: Console,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw it anew each second until the run has ended, or Ctrl-C; through any silence of the server."""
    from rich.live import Live

    trouble = ""
    try:
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                live.update(_page(told, trouble, console.width), refresh=True)
                if told["status"] in ENDED and not is_live(told["total"]):
                    return
                sleep(1)
                try:
                    told, trouble = api.get(path, **asked), ""
                except (Unreachable, TryLater) as error:
                    trouble = f"{error.message} Trying again …"
    except KeyboardInterrupt:
        note(f"{clean(told['run'] or 'It')} goes on without being watched.")


def tells_nothing(told: dict[str, Any]) -> bool:
    """Whether it is a run that told of no task."""
    return bool(told["run"] and not told["total"]["total"])


def is_live(bar: dict[str, Any]) -> bool:
    """Whether something is still to come: what an ended attempt leaves is released a moment later."""
    return bool(bar["total"] > bar["finished"])


def _page(told: dict[str, Any], trouble: str, width: int) -> RenderableType:
    """The totals, a bar for each prefix that there is room for, and what is wrong now."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = [Text(line) for line in summary(told)]
    if tells_nothing(told):
        lines.append(Text(HOW, style="dim"))
    if told["prefixes"]:
        lines.append(drawn(told["prefixes"], width))
    if told["next"]:
        lines.append(Text("and more; all of them: --once", style="dim"))
    if trouble:
        lines.append(Text(trouble, style="yellow"))
    return Group(*lines)
