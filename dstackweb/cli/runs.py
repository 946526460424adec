"""`dstackweb ps`, `priority`, `stop`, `release` and `delete`, and a run's status in words."""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated, Any

import typer

from dstackweb.cli import config, sweeps
from dstackweb.cli.completion import queue_names
from dstackweb.cli.language import N_, _, age_text, clock_text, listed, start_text, word
from dstackweb.cli.options import Json, Quiet, RunName, Watch, Yes, flag, known_statuses
from dstackweb.cli.output import ACTIVE, ApiError, CliError, clean, confirm, note, show_answer
from dstackweb.cli.tables import Column, ItemColumns, Note, Rows, View, show_found, watch_view

RELEASED = {"hold_ended": N_("hold ended"), "given_back": N_("released early")}
"""How holds end, by termination reason."""


def ps(
    everything: Annotated[bool, flag("--all", "-a", help=_("Include ended runs."))] = False,
    status: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATUS",
            help=_("Only runs in this status (running, failed …), ended ones too; repeatable."),
            callback=known_statuses,
        ),
    ] = None,
    user: Annotated[str, typer.Option(metavar="TEXT", help=_("Only runs of this member."))] = "",
    queue: Annotated[
        str, typer.Option(metavar="TEXT", help=_("Only runs of this queue."), autocompletion=queue_names)
    ] = "",
    search: Annotated[str, typer.Option(metavar="TEXT", help=_("Only runs with this in their name."))] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=500, help=_("Maximum number of runs."))] = 50,
    start: Annotated[bool, flag("--start", help=_("Show when waiting runs are expected to start."))] = False,
    follow: Watch = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the project's runs, newest first."""
    api = config.connect()

    def fetch() -> dict[str, Any]:
        statuses = status or (None if everything else ACTIVE)
        return api.get(
            api.in_project("runs"), status=statuses, user=user or None, queue=queue or None, q=search or None,
            limit=limit,
        )  # fmt: skip

    def view(page: dict[str, Any]) -> View:
        if page["items"]:
            yield Rows.of(START_COLUMNS if start else COLUMNS, page["items"])
        elif status or user or queue or search:
            yield Note(_("No matching runs."))
        elif everything:
            yield Note(_("No runs. Submit one: dstackweb apply -f FILE"))
        else:
            yield Note(_("No active runs. All runs: dstackweb ps -a"))
        if page["next"]:
            yield Note(_("Showing the newest {n}; for more: --limit", n=len(page["items"])))

    page = fetch()
    if follow:
        watch_view(api, page, fetch, view)
    else:
        show_found(page, view(page), as_json, quiet)


def priority(
    run: RunName,
    value: Annotated[int, typer.Argument(metavar="N", help=_("0 to 100; higher starts first."))],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Change the priority of a run, and with it its position in the queue, or of all runs of a sweep."""
    api = config.connect()
    found = sweeps.find(api, run)
    if sweeps.is_sweep(found):
        sweeps.set_priority(api, found, value, as_json, quiet)
        return
    path = api.in_project("runs", found["id"])
    seen = api.send("GET", path)
    before = api.json(seen)
    try:
        # If-Match: a change that someone made since the GET is not overwritten.
        answer = api.send("PATCH", path, json={"priority": value}, headers={"If-Match": seen.headers["ETag"]})
    except ApiError as refused:
        if refused.status != 412:
            raise
        raise CliError(
            refused.message, _("To set it anyway: dstackweb priority {run} {value}", run=run, value=value)
        ) from None
    after = api.json(answer)
    values = {"name": after["name"], "before": before["priority"], "after": after["priority"]}
    text = _("{name}: priority {before} → {after}", **values)
    if after["position"]:
        values |= {"position_before": before["position"] or "–", "position_after": after["position"]}
        values["queue"] = after["queue"]
        text = _(
            "{name}: priority {before} → {after}, position {position_before} → {position_after} in {queue}", **values
        )
    show_answer(after, text, as_json, quiet)


def stop(
    run: RunName,
    abort: Annotated[bool, flag("--abort", help=_("Kill at once instead of after stop_duration."))] = False,
    yes: Yes = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Stop a run, or all runs of a sweep: send SIGTERM, then SIGKILL after its stop_duration."""
    api = config.connect()
    found = sweeps.find(api, run)
    if sweeps.is_sweep(found):
        sweeps.stop_sweep(api, found, abort=abort, yes=yes, as_json=as_json, quiet=quiet)
        return
    values = {"name": found["name"], "user": found["user"], "status": word(found["status"])}
    question = (
        _("Kill {name} of {user} ({status})?", **values) if abort else _("Stop {name} of {user} ({status})?", **values)
    )
    if found["spec"].get("schedule"):
        question = _("{sentence} {another}", sentence=question, another=_("Its schedule ends too."))
    confirm(question, yes, _("Not stopped."))
    # By id: a newer run may have taken the name while the question was open.
    stopped = api.post(api.in_project("runs", found["id"], "stop"), {"abort": abort})
    show_answer(stopped, f"{stopped['name']}: {word(stopped['status'])}", as_json, quiet)
    if stopped["silent_detail"]:
        note(clean(stopped["silent_detail"]))
    if found["spec"].get("schedule"):
        note(_("Its schedule has ended. Resubmit to resume the schedule."))


def release(run: RunName, as_json: Json = False, quiet: Quiet = False) -> None:
    """Let a run or sweep that waits for others (its `after`) enter its queue now."""
    api = config.connect()
    found = sweeps.find(api, run)
    kind, text = ("sweeps", sweeps.summary) if sweeps.is_sweep(found) else ("runs", status_text)
    released = api.post(api.in_project(kind, found["id"], "release"))
    show_answer(released, text(released), as_json, quiet)


def delete(
    run: RunName,
    yes: Yes = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete an ended run for good, with its log and its directory."""
    api = config.connect()
    found = api.get(api.in_project("runs", run))
    values = {"name": found["name"], "user": found["user"], "status": word(found["status"])}
    question = _("Delete {name} of {user} ({status}), with its log and its directory?", **values)
    if found["spec"].get("schedule") and found.get("next_at"):
        question = _("{sentence} {another}", sentence=question, another=_("Its schedule ends too."))
    confirm(question, yes, _("Not deleted."))
    # By id: a newer run may have taken the name while the question was open.
    api.send("DELETE", api.in_project("runs", found["id"]))
    show_answer({"id": found["id"], "name": found["name"]}, _("{name}: deleted", name=found["name"]), as_json, quiet)


def message_of(run: dict[str, Any]) -> str:
    """The message of a run as the server sends it, its times in this time zone, with the exit code if it lacks it."""
    message, code = _timed_message(run) or str(run["status_message"]), run["exit_code"]
    if code and str(code) not in message:
        return " ".join(filter(None, [message, _("Exit code {code}.", code=code)]))
    return message


def status_word(run: dict[str, Any]) -> str:
    """Its status; of a service that runs, how that is instead, as `running, unhealthy`."""
    status = word(run["status"])
    return listed([status, word(run["health"])]) if run.get("health") else status


COLUMNS: ItemColumns = {
    Column("NAME"): itemgetter("name"),
    Column("STATUS"): status_word,
    Column("PRIO", right=True): itemgetter("priority"),
    Column("USER"): itemgetter("user"),
    Column("AGE", right=True): lambda run: age_text(run["submitted_at"]),
    Column("WHERE", wide=True): itemgetter("where"),
    Column("MESSAGE", wide=True): message_of,
}
"""Of runs, the items of `GET …/runs`."""

START_COLUMNS: ItemColumns = {
    Column("NAME"): itemgetter("name"),
    Column("STATUS"): status_word,
    Column("USER"): itemgetter("user"),
    Column("AGE", right=True): lambda run: age_text(run["submitted_at"]),
    Column("STARTS"): lambda run: start_text(run.get("starts")),
    Column("BECAUSE", wide=True): lambda run: (run.get("starts") or {}).get("detail", ""),
}
"""The same with `--start`."""


def _timed_message(run: dict[str, Any]) -> str:
    """Until when a hold lasts, or when a scheduled or retried run starts; empty for other runs."""
    if run.get("held_until"):
        return _("held until {time}", time=clock_text(run["held_until"]))
    if run.get("next_at"):
        at, message = clock_text(run["next_at"]), run["status_message"]
        if run["status"] != "pending":
            then = _("next run at {time}", time=at)
        elif run["attempt"] == 1:
            return _("starts at {time}", time=at)
        else:
            then = _("retry at {time}", time=at)
        return _("; ").join([message, then]) if message else then
    return _(RELEASED[run["termination_reason"]]) if run["termination_reason"] in RELEASED else ""


def status_text(run: dict[str, Any]) -> str:
    """A run's status on one line: `swift-otter: submitted, position 3, waiting for a GPU`."""
    parts = [clean(status_word(run))]
    if run.get("position"):
        parts.append(_("position {position}", position=run["position"]))
    if why := run.get("reason_detail") or run.get("silent_detail") or message_of(run):
        parts.append(clean(why))
    return f"{clean(run['name'])}: {listed(parts)}"
