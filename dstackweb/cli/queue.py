"""`dstackweb queue`: the line in its true order, and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.errors import UsageError
from dstackweb.cli.output import Column, age_text, clean, note, show_json, show_table

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

LIMITS = {  # for one, for any other number
    "max_running": ("run placed", "runs placed"),
    "max_gpus": ("GPU held", "GPUs held"),
    "max_running_per_user": ("run placed per member", "runs placed per member"),
    "max_gpus_per_user": ("GPU held per member", "GPUs held per member"),
}

DIGITS = 12
"""Of the longest number that the server is asked about; what is too much is the server's to say."""


def queue(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The queue.")] = "default",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="As the API gives it, for scripts.")] = False,
    every: Annotated[bool, typer.Option("--list", "-l", help="List the project's queues instead.")] = False,
    create: Annotated[bool, typer.Option("--create", help="Make the queue first.")] = False,
    pause: Annotated[bool | None, typer.Option("--pause/--resume", help="Let nothing leave it.")] = None,
    drain: Annotated[bool | None, typer.Option("--drain/--undrain", help="Take no new runs.")] = None,
    ageing: Annotated[
        str | None, typer.Option(metavar="MIN|strict", help="Minutes of waiting that make up for a point of priority.")
    ] = None,
    max_running: Annotated[str | None, typer.Option(metavar="N|none", help="Its runs placed at once.")] = None,
    max_gpus: Annotated[str | None, typer.Option(metavar="N|none", help="GPUs that its runs hold at once.")] = None,
    max_running_per_user: Annotated[str | None, typer.Option(metavar="N|none", help="The same per member.")] = None,
    max_gpus_per_user: Annotated[str | None, typer.Option(metavar="N|none", help="The same per member.")] = None,
) -> None:
    """Show a queue in its true order, and why each run waits. Managers change its settings with the options."""
    limits = {
        "max_running": max_running,
        "max_gpus": max_gpus,
        "max_running_per_user": max_running_per_user,
        "max_gpus_per_user": max_gpus_per_user,
    }
    settings: dict[str, Any] = {key: _number(key, text, "none") for key, text in limits.items() if text is not None}
    if ageing is not None:
        settings["ageing_minutes"] = _number("ageing", ageing, "strict")
    settings |= {key: on for key, on in (("paused", pause), ("draining", drain)) if on is not None}
    if every and (create or settings):
        raise UsageError("--list changes nothing: name the queue whose settings to change, without it.")
    api = _connect()
    if every:
        _list(api, as_json)
        return
    if create:
        api.send("POST", api.in_project("queues"), json={"name": name, **settings})
    elif settings:
        api.send("PATCH", api.in_project("queues", name), json=settings)
    page = api.get(api.in_project("queues", name), limit=limit)
    if as_json:
        show_json(page)
    else:
        _show(page)


def _connect() -> Api:
    from dstackweb.cli.client import Api

    return Api(config.load())


def _number(option: str, text: str, nothing: str) -> int | None:
    """A whole number, or None for the word that stands for it."""
    if text == nothing:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        given = text if len(text) <= DIGITS else f"{text[:DIGITS]}…"
        raise UsageError(f"--{option.replace('_', '-')} is a whole number or {nothing}, not {clean(given)!r}.")
    return int(text)


def _list(api: Api, as_json: bool) -> None:
    page = api.get(api.in_project("queues"))
    if as_json:
        show_json(page)
        return
    columns = [Column("NAME"), Column("WAIT", right=True), Column("PENDING", right=True), Column("PLACED", right=True)]
    rows = [
        (row["name"], row["submitted"], row["pending"], _placed(row), "; ".join(settings_text(row)))
        for row in page["items"]
    ]
    show_table([*columns, Column("SETTINGS", wide=True)], rows)


def _placed(row: dict[str, Any]) -> int:
    return sum(int(row[status]) for status in ("provisioning", "running", "terminating"))


def settings_text(row: dict[str, Any]) -> list[str]:
    """A queue's settings in words, what holds runs up first."""
    told = []
    if row["paused"]:
        told.append("paused: nothing leaves it until a manager resumes it")
    if row["draining"]:
        told.append("draining: it takes no new runs, what waits still starts")
    told += [f"at most {row[key]} {what[row[key] != 1]}" for key, what in LIMITS.items() if row[key] is not None]
    minutes = row["ageing_minutes"]
    told.append("strict priority" if minutes is None else f"a point of priority per {minutes} min of waiting")
    return told


def _show(page: dict[str, Any]) -> None:
    note(f"{clean(page['name'])}: {'; '.join(settings_text(page))}.")
    if not page["items"]:
        note(f"Nothing waits in {clean(page['name'])}.")
        return
    columns = [Column("#", right=True), Column("NAME"), Column("PRIO", right=True), Column("USER")]
    rows = [
        (*(run[key] for key in ("position", "name", "priority", "user")), age_text(run["submitted_at"]), _why(run))
        for run in page["items"]
    ]
    show_table([*columns, Column("WAITS", right=True), Column("WHY", wide=True)], rows)
    if page["next"]:
        note(f"The first {len(rows)}; more with --limit.")


def _why(run: dict[str, Any]) -> str:
    why = str(run["reason_detail"] or run["reason"])
    return f"{why.rstrip('.')}; moved by {run['moved_by']} {age_text(run['moved_at'])} ago" if run["moved_by"] else why
