"""`dstackweb sweep` and `retry`, and what `stop` and `priority` do with a sweep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import sweep_names
from dstackweb.cli.language import N_, _, _n, age_text, duration_text, listed, run_count, word
from dstackweb.cli.options import Json, Quiet, Watch, Yes, flag, known_statuses, one_form
from dstackweb.cli.output import ENDED, ApiError, UsageError, clean, confirm, show_answer, show_ids, show_json
from dstackweb.cli.tables import Column, ItemColumns, Note, Rows, View, bar, show_csv, show_view, watch_view

WORDS = {"to_come": N_("to come"), "dropped": N_("never started")}
COUNTED = {
    "running": N_("{n:,} running"),
    "waiting": N_("{n:,} waiting"),
    "done": N_("{n:,} done"),
    "failed": N_("{n:,} failed"),
    "terminated": N_("{n:,} terminated"),
    "left": N_("{n:,} to come"),
    "dropped": N_("{n:,} never started"),
    "removed": N_("{n:,} removed"),
}
"""The counts of a sweep in the order in which they are shown, with their words."""
SweepName = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP", help=_("The sweep's name (the newest of that name) or id."), autocompletion=sweep_names
    ),
]


def sweep(
    name: Annotated[
        str,
        typer.Argument(metavar="SWEEP", help=_("A sweep's name or id; without it, all."), autocompletion=sweep_names),
    ] = "",
    status: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATUS",
            help=_("Only runs in this status (running, done, failed …); repeatable."),
            callback=known_statuses,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=500, help=_("Maximum number of lines."))] = 50,
    start: Annotated[int, typer.Option("--from", min=0, metavar="INDEX", help=_("The first index to show."))] = 0,
    follow: Watch = False,
    as_json: Json = False,
    quiet: Quiet = False,
    as_csv: Annotated[bool, flag("--csv", help=_("Print the whole table as CSV."), callback=one_form)] = False,
) -> None:
    """Show a sweep and its runs with their parameters, or list the sweeps."""
    api = config.connect()
    if as_csv:
        if not name:
            raise UsageError(_("--csv needs the name of a sweep."))
        show_csv(api, api.in_project("sweeps", name, "export"))
        return

    def fetch() -> dict[str, Any]:
        if not name:
            return api.get(api.in_project("sweeps"), limit=limit)
        runs = api.get(api.in_project("sweeps", name, "runs"), status=status, limit=limit, cursor=start)
        return {**api.get(api.in_project("sweeps", name)), "runs": runs["items"], "next": runs["next"]}

    view: Callable[[dict[str, Any]], View] = _view if name else _list_view
    found = fetch()
    if as_json:
        show_json(found)
    elif quiet:
        show_ids(found["runs"] if name else found["items"], "name")
    elif follow:
        watch_view(api, found, fetch, view, lambda seen: bool(seen.get("ended_at")))
    else:
        show_view(view(found))


def retry(name: SweepName, as_json: Json = False, quiet: Quiet = False) -> None:
    """Run the failed runs of a sweep once more, with the same parameters. Runs that people stopped are left."""
    api = config.connect()
    retried = api.post(api.in_project("sweeps", name, "retry"))
    show_answer(retried, summary(retried), as_json, quiet)


def find(api: config.Api, name: str) -> dict[str, Any]:
    """The run of this name, or else the sweep, which has a `type`; of an ended run and an active sweep, the sweep."""
    run = _known(api, "runs", name)
    if isinstance(run, dict) and run["status"] not in ENDED:
        return run
    found = _known(api, "sweeps", name)
    if isinstance(found, dict) and (isinstance(run, ApiError) or not found["ended_at"]):
        return found
    if isinstance(run, ApiError):
        raise run
    return run


def _known(api: config.Api, kind: str, name: str) -> dict[str, Any] | ApiError:
    """What is there, or the error that says that it is not."""
    try:
        return api.get(api.in_project(kind, name))
    except ApiError as error:
        if error.status != 404:
            raise
        return error


def is_sweep(found: dict[str, Any]) -> bool:
    return found.get("type") == "sweep"


def stop_sweep(api: config.Api, found: dict[str, Any], *, abort: bool, yes: Yes, as_json: bool, quiet: bool) -> None:
    counts = found["counts"]
    values = {"name": found["name"], "user": found["user"]}
    values["active"] = _n("{n:,} active run", "{n:,} active runs", counts["waiting"] + counts["running"])
    if counts["left"]:
        values["active"] = listed([values["active"], _("{n:,} never to start", n=counts["left"])])
    question = (
        _("Kill sweep {name} of {user} ({active})?", **values)
        if abort
        else _("Stop sweep {name} of {user} ({active})?", **values)
    )
    confirm(question, yes, _("Not stopped."))
    stopped = api.post(api.in_project("sweeps", found["id"], "stop"), {"abort": abort})
    show_answer(stopped, summary(stopped), as_json, quiet)


def set_priority(api: config.Api, found: dict[str, Any], value: int, as_json: bool, quiet: bool) -> None:
    changed = api.patch(api.in_project("sweeps", found["id"]), {"priority": value})
    values = {"name": clean(changed["name"]), "before": found["priority"], "after": changed["priority"]}
    show_answer(changed, _("{name}: priority {before} → {after} for all its runs", **values), as_json, quiet)


def summary(found: dict[str, Any]) -> str:
    """`lr: 20 runs, 4 running, 10 done, 2 failed, 4 to come`."""
    counts = [_(text, n=found["counts"][key]) for key, text in COUNTED.items() if found["counts"][key]]
    return f"{clean(found['name'])}: {listed([run_count(found['size']), *counts])}"


def _list_view(page: dict[str, Any]) -> View:
    if page["items"]:
        yield Rows.of(COLUMNS, page["items"])
    else:
        yield Note(_("No sweeps. A run file with `array` makes one: dstackweb apply -f FILE"))
    if page["next"]:
        yield Note(_("Showing the newest {n}; for more: --limit", n=len(page["items"])))


def _view(found: dict[str, Any]) -> View:
    yield summary(found)
    if found["max_parallel"]:
        yield Note(_("At most {n:,} at once.", n=found["max_parallel"]))
    if found["status_message"]:
        yield Note(clean(found["status_message"]))
    if found["waits_for_name"]:
        yield Note(_("Waits: another run is called {name}.", name=clean(found["waits_for_name"])))
    columns: dict[Column, Callable[[dict[str, Any]], object]] = {Column("NAME"): itemgetter("name")}
    for parameter in found["parameters"]:
        columns[Column(parameter, given=True)] = partial(_parameter, parameter)
    if found["runs"]:
        yield Rows.of({**columns, **OUTCOME}, found["runs"])
    if found["next"]:
        yield Note(_("For more: --from {index}, --limit, or --csv", index=found["next"]))


def _parameter(name: str, run: dict[str, Any]) -> object:
    return run["parameters"].get(name, "")


def _ended(found: dict[str, Any]) -> int:
    return sum(found["counts"][status] for status in ENDED)


COLUMNS: ItemColumns = {
    Column("NAME"): itemgetter("name"),
    Column("RUNS", right=True): lambda one: f"{one['size']:,}",
    Column("ENDED"): lambda one: bar(_ended(one), one["size"]),
    Column("RUNNING", right=True): lambda one: one["counts"]["running"] or "",
    Column("WAITING", right=True): lambda one: one["counts"]["waiting"] + one["counts"]["left"] or "",
    Column("DONE", right=True): lambda one: one["counts"]["done"] or "",
    Column("FAILED", right=True): lambda one: one["counts"]["failed"] or "",
    Column("PRIO", right=True): itemgetter("priority"),
    Column("USER"): itemgetter("user"),
    Column("AGE", right=True): lambda one: age_text(one["submitted_at"]),
}
"""Of sweeps, the items of `GET …/sweeps`."""

OUTCOME: ItemColumns = {
    Column("STATUS"): lambda run: _(WORDS[run["status"]]) if run["status"] in WORDS else word(run["status"]),
    Column("EXIT", right=True): itemgetter("exit_code"),
    Column("TOOK", right=True): lambda run: "" if run["duration_s"] is None else duration_text(run["duration_s"]),
    Column("MESSAGE", wide=True): itemgetter("status_message"),
}
"""Of the runs of a sweep, behind their parameters."""
