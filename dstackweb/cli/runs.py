"""`dstackweb ps`, `priority` and `stop`, and a run's status in words."""

from __future__ import annotations

import sys
from operator import itemgetter
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.errors import ApiError, CliError
from dstackweb.cli.output import (
    Column,
    ItemColumns,
    Json,
    RunName,
    age_text,
    clean,
    clock_text,
    note,
    show_items,
    show_json,
)

ACTIVE = ("pending", "submitted", "provisioning", "running", "terminating")
ENDED = ("done", "failed", "terminated")
RELEASED = {"hold_ended": "hold ended", "given_back": "released early"}
"""How holds end, by termination reason."""


def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include ended runs.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Maximum number of runs.")] = 50,
    as_json: Json = False,
) -> None:
    """List the project's runs, newest first."""
    api = config.connect()
    page = api.get(api.in_project("runs"), status=None if everything else ACTIVE, limit=limit)
    if as_json:
        show_json(page)
        return
    if not page["items"]:
        note(
            "No runs. Submit one: dstackweb apply -f FILE"
            if everything
            else "No active runs. All runs: dstackweb ps -a"
        )
        return
    show_items(COLUMNS, page["items"])
    if page["next"]:
        note(f"Showing the newest {len(page['items'])}; for more: --limit")


def priority(
    run: RunName,
    value: Annotated[int, typer.Argument(metavar="N", help="0 to 100; higher starts first.")],
) -> None:
    """Change a run's priority, and with it its position in the queue."""
    api = config.connect()
    path = api.in_project("runs", run)
    seen = api.send("GET", path)
    before = api.json(seen)
    try:
        # If-Match: a change that someone made since the GET is not overwritten.
        answer = api.send("PATCH", path, json={"priority": value}, headers={"If-Match": seen.headers["ETag"]})
    except ApiError as refused:
        if refused.status != 412:
            raise
        raise CliError(refused.message, f"To set it anyway: dstackweb priority {run} {value}") from None
    after = api.json(answer)
    text = f"{after['name']}: priority {before['priority']} → {after['priority']}"
    if after["position"]:
        text += f", position {before['position'] or '–'} → {after['position']} in {after['queue']}"
    typer.echo(text)


def stop(
    run: RunName,
    abort: Annotated[bool, typer.Option("--abort", help="Kill at once instead of after stop_duration.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
) -> None:
    """Stop a run: send SIGTERM, then SIGKILL after its stop_duration."""
    api = config.connect()
    found = api.get(api.in_project("runs", run))
    question = f"{'Kill' if abort else 'Stop'} {found['name']} of {found['user']} ({found['status']})?"
    if found["spec"].get("schedule"):
        question += " Its schedule ends too."
    if not yes and sys.stdin.isatty() and not typer.confirm(question, err=True):
        note("Not stopped.")
        raise typer.Exit(1)
    # By id: a newer run may have taken the name while the question was open.
    stopped = api.json(api.send("POST", api.in_project("runs", found["id"], "stop"), json={"abort": abort}))
    typer.echo(f"{stopped['name']}: {stopped['status']}")
    if found["spec"].get("schedule"):
        note("Its schedule has ended. Resubmit to resume the schedule.")


def message_of(run: dict[str, Any]) -> str:
    """The message of a run as the server sends it, its times in this time zone, with the exit code if it lacks it."""
    message, code = _timed_message(run) or str(run["status_message"]), run["exit_code"]
    if code and str(code) not in message:
        return f"{message}, exit code {code}" if message else f"exit code {code}"
    return message


COLUMNS: ItemColumns = {
    Column("NAME"): itemgetter("name"),
    Column("STATUS"): itemgetter("status"),
    Column("PRIO", right=True): itemgetter("priority"),
    Column("USER"): itemgetter("user"),
    Column("AGE", right=True): lambda run: age_text(run["submitted_at"]),
    Column("WHERE", wide=True): itemgetter("where"),
    Column("MESSAGE", wide=True): message_of,
}
"""Of runs, the items of `GET …/runs`."""


def _timed_message(run: dict[str, Any]) -> str:
    """Until when a hold lasts, or when a scheduled or retried run starts; empty for other runs."""
    if run.get("held_until"):
        return f"held until {clock_text(run['held_until'])}"
    if run.get("next_at"):
        at = clock_text(run["next_at"])
        if run["status"] == "pending":
            return f"starts at {at}" if run["attempt"] == 1 else f"{run['status_message']}; retry at {at}".lstrip("; ")
        return f"{run['status_message']}; next run at {at}".lstrip("; ")
    return RELEASED.get(run["termination_reason"], "")


def status_text(run: dict[str, Any]) -> str:
    """A run's status on one line: `swift-otter: submitted, position 3, waiting for a GPU`."""
    parts = [clean(run["status"])]
    if run.get("position"):
        parts.append(f"position {run['position']}")
    if why := run.get("reason_detail") or message_of(run):
        parts.append(clean(why))
    return f"{clean(run['name'])}: {', '.join(parts)}"
