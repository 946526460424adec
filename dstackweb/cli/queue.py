"""`dstackweb queue` and `view`: a queue in order, its settings, and filters of queues under a name."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import queue_names, view_names
from dstackweb.cli.history import show_past
from dstackweb.cli.language import N_, _, _n, age_text, duration_text, gpu_count, listed, run_count, start_text
from dstackweb.cli.options import Commands, Json, Quiet, Watch, flag
from dstackweb.cli.output import ENDED, CliError, UsageError, clean, show_answer
from dstackweb.cli.tables import Column, ItemColumns, Note, Rows, View, bar, rows_or, show_found, watch_view

NOTHING = {"ageing_minutes": "strict", "fair_share_minutes": "off", "preempt_points": "off"}
"""What is said for no number; of other settings `none`."""
DIGITS = 12
"""The most digits of a number that is sent; the server knows its own limits."""
LIMITS: dict[str, tuple[str, Callable[[int], str]]] = {
    "max_running": (N_("at most {amount} at once"), run_count),
    "max_gpus": (N_("at most {amount} at once"), gpu_count),
    "max_running_per_user": (N_("at most {amount} at once per member"), run_count),
    "max_gpus_per_user": (N_("at most {amount} at once per member"), gpu_count),
}


RECLAIM = {
    "lower_priority": N_("takes back lent GPUs from preemptible runs of lower priority"),
    "any": N_("takes back lent GPUs from preemptible runs"),
}


def _set(help_text: str, metavar: str = "N|none") -> Any:
    return typer.Option(metavar=metavar, help=help_text)


def queue(
    name: Annotated[str, typer.Argument(metavar="NAME", help=_("The queue."), autocompletion=queue_names)] = "default",
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help=_("Maximum number of runs."))] = 20,
    follow: Watch = False,
    as_json: Json = False,
    quiet: Quiet = False,
    unfolded: Annotated[
        bool, flag("--all", "-a", help=_("List each waiting run of a sweep; --json and --quiet always do."))
    ] = False,
    view: Annotated[
        str,
        typer.Option(metavar="NAME", help=_("Only what a saved view shows: view list."), autocompletion=view_names),
    ] = "",
    at: Annotated[
        str, typer.Option(metavar="TIME", help=_("As it was: 2026-11-26T14:00, 14:00 or -2h, up to 30 days ago."))
    ] = "",
    every: Annotated[bool, flag("--list", "-l", help=_("List the project's queues."))] = False,
    create: Annotated[bool, flag("--create", help=_("Create the queue."))] = False,
    pause: Annotated[bool | None, flag("--pause/--resume", help=_("Pause or resume scheduling."))] = None,
    drain: Annotated[bool | None, flag("--drain/--undrain", help=_("Refuse or accept new runs."))] = None,
    ageing: Annotated[str | None, _set(_("Minutes of waiting for +1 priority; strict for none."), "MIN|strict")] = None,
    fair_share: Annotated[
        str | None, _set(_("Maximum penalty in minutes for members above the median."), "MIN|off")
    ] = None,
    half_life: Annotated[
        int | None, typer.Option(metavar="DAYS", min=1, max=90, help=_("Days after which past usage counts half."))
    ] = None,
    max_running: Annotated[str | None, _set(_("Maximum runs at once."))] = None,
    max_gpus: Annotated[str | None, _set(_("Maximum GPUs at once."))] = None,
    max_running_per_user: Annotated[str | None, _set(_("Maximum runs at once per member."))] = None,
    max_gpus_per_user: Annotated[str | None, _set(_("Maximum GPUs at once per member."))] = None,
    cohort: Annotated[
        str | None, _set(_("Lend and borrow unused GPUs with queues of this cohort."), "NAME|none")
    ] = None,
    borrow_gpus: Annotated[str | None, _set(_("Maximum GPUs to borrow in the cohort."))] = None,
    lend_gpus: Annotated[str | None, _set(_("Maximum GPUs to lend in the cohort."))] = None,
    reclaim: Annotated[
        str | None,
        _set(
            _("Displace preemptible runs of other queues that hold lent GPUs, of a lower or any priority."),
            "never|lower_priority|any",
        ),
    ] = None,
    preempt_points: Annotated[
        str | None, _set(_("Displace preemptible runs whose priority is at least N lower; off: never."), "N|off")
    ] = None,
    preempt_gpu_hours: Annotated[
        str | None, _set(_("GPU-hours that a member's runs may displace within 24 hours."))
    ] = None,
) -> None:
    """Show a queue in its order and why each run waits. Managers change its settings with the options."""
    numbers = {
        "max_running": max_running,
        "max_gpus": max_gpus,
        "max_running_per_user": max_running_per_user,
        "max_gpus_per_user": max_gpus_per_user,
        "preempt_gpu_hours": preempt_gpu_hours,
        "borrow_gpus": borrow_gpus,
        "lend_gpus": lend_gpus,
        "ageing_minutes": ageing,
        "fair_share_minutes": fair_share,
        "preempt_points": preempt_points,
    }
    others = {
        "cohort": "" if cohort == "none" else cohort,
        "reclaim": reclaim and reclaim.replace("-", "_"),
        "fair_share_half_life_days": half_life,
        "paused": pause,
        "draining": drain,
    }
    settings: dict[str, Any] = {key: _number(key, text) for key, text in numbers.items() if text is not None}
    settings |= {key: value for key, value in others.items() if value is not None}
    if every and (create or settings):
        raise UsageError(_("--list changes nothing. To change a queue's settings, leave --list out."))
    if view and (every or create or settings or at):
        raise UsageError(_("--view shows runs of a queue as it is, and changes nothing. Leave the other options out."))
    if at and (every or create or settings or follow):
        raise UsageError(_("--at shows the past of a queue, and takes only --limit, --json and --quiet."))
    api = config.connect()
    if at:
        show_past(api, name, at, limit, as_json, quiet)
        return
    if create:
        api.send("POST", api.in_project("queues"), json={"name": name, **settings})
    elif settings:
        api.send("PATCH", api.in_project("queues", name), json=settings)
    lines: dict[str, Any] = {} if unfolded or as_json or quiet else {"folded": True}
    if view:
        lines = {"view": view}

    def fetch() -> dict[str, Any]:
        if every:
            return api.get(api.in_project("queues"))
        return api.get(api.in_project("queues", name), limit=limit, **lines)

    shown, page = _queues if every else _waiting, fetch()
    if follow:
        watch_view(api, page, fetch, shown)
    else:
        show_found(page, shown(page), as_json, quiet, "name" if every else "id")


def _number(key: str, text: str) -> int | None:
    """The value of a setting; None for its word for none."""
    if text == (nothing := NOTHING.get(key, "none")):
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        given = clean(text if len(text) <= DIGITS else f"{text[:DIGITS]}…")
        values = {"option": key.removesuffix("_minutes").replace("_", "-"), "nothing": nothing, "given": given}
        raise UsageError(_("--{option} takes a whole number or {nothing}, not {given!r}.", **values))
    return int(text)


def _queues(page: dict[str, Any]) -> View:
    yield Rows.of(QUEUE_COLUMNS, page["items"])


def _placed(row: dict[str, Any]) -> int:
    return sum(int(row[status]) for status in ("provisioning", "running", "terminating"))


def settings_text(row: dict[str, Any]) -> list[str]:
    """A queue's settings in words, those that stop runs first."""
    parts = []
    if row["paused"]:
        parts.append(_("paused: no run starts until a manager resumes it"))
    if row["draining"]:
        parts.append(_("draining: new runs are refused, waiting runs still start"))
    parts += [_(text, amount=count(row[key])) for key, (text, count) in LIMITS.items() if row[key] is not None]
    if (points := row.get("preempt_points")) is not None:
        parts.append(_("displaces preemptible runs whose priority is at least {n} lower", n=points))
    if (hours := row.get("preempt_gpu_hours")) is not None:
        parts.append(_("a member's runs displace at most {n} GPU-h in 24 h", n=hours))
    if cohort := row.get("cohort"):
        parts.append(_("cohort {name}", name=clean(cohort)))
    if cohort and (priority := RECLAIM.get(row.get("reclaim", ""))):
        parts.append(_(priority))
    if borrowed := row.get("borrowed_gpus"):
        parts.append(_n("{n:,} GPU borrowed", "{n:,} GPUs borrowed", borrowed))
    minutes = row["ageing_minutes"]
    parts.append(_("strict priority") if minutes is None else _("+1 priority per {n} min waiting", n=minutes))
    if row.get("fair_share_minutes"):
        most, days = duration_text(60 * row["fair_share_minutes"]), row["fair_share_half_life_days"]
        parts.append(
            _n(
                "fair share: up to {most} behind, half-life {n:,} day",
                "fair share: up to {most} behind, half-life {n:,} days",
                days,
                most=most,
            )
        )
    return parts


def _waiting(page: dict[str, Any]) -> View:
    settings = _("; ").join(settings_text(page))
    yield Note(_("{name}: {settings}.", name=clean(page["name"]), settings=settings))
    if not page["items"]:
        yield Note(_("No runs wait in {name}.", name=clean(page["name"])))
        return
    folds = any(run.get("folded") for run in page["items"])
    *most, why = RUN_COLUMNS.items()
    yield Rows.of(dict([*most, *SWEEP_COLUMNS.items(), why]) if folds else RUN_COLUMNS, page["items"])
    if page.get("shares"):
        yield ""
        yield Rows.of(SHARE_COLUMNS, page["shares"])
    if page["next"]:
        yield Note(_("Showing the first {n}; for more: --limit", n=len(page["items"])))


def _name(run: dict[str, Any]) -> str:
    """Of a fold that of its sweep, with how many of its runs wait."""
    if folded := run.get("folded"):
        return _n("{name} ({n:,} run)", "{name} ({n:,} runs)", folded["runs"], name=folded["sweep"])
    return str(run["name"])


def _progress(run: dict[str, Any]) -> str:
    folded = run.get("folded")
    return bar(sum(folded["counts"][status] for status in ENDED), folded["size"]) if folded else ""


def _why(run: dict[str, Any]) -> str:
    parts = [str(run["reason_detail"] or run["reason"])]
    if run.get("penalty_s"):
        parts.append(_("fair share: {duration} behind", duration=duration_text(run["penalty_s"])))
    if run["moved_by"]:
        parts.append(_("moved by {user} {duration} ago", user=run["moved_by"], duration=age_text(run["moved_at"])))
    return parts[0] if len(parts) == 1 else _("; ").join([parts[0].rstrip(".。"), *parts[1:]])


RUN_COLUMNS: ItemColumns = {
    Column("#", right=True): itemgetter("position"),
    Column("NAME"): _name,
    Column("PRIO", right=True): itemgetter("priority"),
    Column("USER"): itemgetter("user"),
    Column("WAITS", right=True): lambda run: age_text(run["submitted_at"]),
    Column("STARTS"): lambda run: start_text(run.get("starts")),
    Column("WHY", wide=True): _why,
}
"""Of waiting runs, the items of `GET …/queues/NAME`."""
SWEEP_COLUMNS: ItemColumns = {Column("SWEEP ENDED"): _progress}
"""Where some of them are folds."""

SHARE_COLUMNS: ItemColumns = {
    Column("FAIR SHARE"): itemgetter("user"),
    Column("GPU-H", right=True): itemgetter("gpu_hours"),
    Column("USED", right=True): itemgetter("used_gpu_hours"),
    Column("HELD", right=True): itemgetter("held_gpus"),
    Column("QUEUED", right=True): itemgetter("queued_gpus"),
    Column("BEHIND", right=True): lambda share: duration_text(share["penalty_s"]) if share["penalty_s"] else "",
}
"""Of members, the `shares` of `GET …/queues/NAME`."""

QUEUE_COLUMNS: ItemColumns = {
    Column("NAME"): itemgetter("name"),
    Column("WAIT", right=True): itemgetter("submitted"),
    Column("PENDING", right=True): itemgetter("pending"),
    Column("PLACED", right=True): _placed,
    Column("SETTINGS", wide=True): lambda row: _("; ").join(settings_text(row)),
}


views_app = Commands(
    "view",
    help=_("Save filters of the project's queues under a name: your own, and those shared with all members."),
    no_args_is_help=True,
)
ViewName = Annotated[str, typer.Argument(metavar="NAME", help=_("The view."), autocompletion=view_names)]
Shared = Annotated[bool, flag("--shared", help=_("The view of all members; managers only."))]


@views_app.command("list")
@views_app.command("ls", hidden=True)
def list_views(as_json: Json = False, quiet: Quiet = False) -> None:
    """List your saved views and the shared ones. Your queue pages begin with the one marked as default."""
    api = config.connect()
    page = api.get(api.in_project("views"))
    columns: ItemColumns = {
        Column("NAME"): itemgetter("name"), Column("SHOWS", wide=True): itemgetter("query"), Column(): _marks
    }  # fmt: skip
    view = rows_or(_("No views. Save one: dstackweb view save NAME --search TEXT"), columns, page["items"])
    show_found(page, view, as_json, quiet, "name")


def _marks(view: dict[str, Any]) -> str:
    return listed([word for key, word in (("shared", _("shared")), ("default", _("default"))) if view[key]])


@views_app.command("save")
def save_view(
    name: ViewName,
    search: Annotated[str, typer.Option("--search", metavar="TEXT", help=_("Runs with this in their name."))] = "",
    member: Annotated[str, typer.Option(metavar="TEXT", help=_("Runs of this member."))] = "",
    needs: Annotated[str, typer.Option(metavar="CODE", help=_("Runs that need this, such as 2xA100 or 2xCPU."))] = "",
    reason: Annotated[
        str, typer.Option(metavar="CODE", help=_("Runs that wait for this, such as waiting_for_capacity."))
    ] = "",
    priority: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=100, help=_("Runs of at least this priority."))
    ] = None,
    group: Annotated[
        str, typer.Option(metavar="reason|member", help=_("Put runs of a reason or member together."))
    ] = "",
    shared: Shared = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Save filters under a name; a view of that name gets these filters."""
    given = {"q": search, "member": member, "needs": needs, "reason": reason, "priority": priority, "group": group}
    query = urlencode({key: value for key, value in given.items() if value not in ("", None)})
    if not query:
        raise UsageError(_("Give what the view shows: --search, --member, --needs, --reason, --priority or --group."))
    api = config.connect()
    view = api.post(api.in_project("views"), {"name": name, "query": query, "shared": shared})
    show_answer(view, _("View {name} saved", name=clean(view["name"])), as_json, quiet)


@views_app.command("rename")
def rename_view(
    name: ViewName,
    new_name: Annotated[str, typer.Argument(metavar="NEW", help=_("Its new name."))],
    shared: Shared = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give a view another name."""
    api = config.connect()
    view = api.patch(_path(api, _found(api, name, shared)), {"name": new_name})
    show_answer(view, _("View {name} renamed to {new}", name=clean(name), new=clean(view["name"])), as_json, quiet)


@views_app.command("default")
def default_view(
    name: ViewName,
    off: Annotated[bool, flag("--off", help=_("Begin with the whole queue again."))] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Have your queue pages begin with a view."""
    api = config.connect()
    view = api.patch(_path(api, _found(api, name)), {"default": not off})
    called = clean(view["name"])
    text = (
        _("The queue no longer opens with {name}", name=called)
        if off
        else _("The queue opens with {name}", name=called)
    )
    show_answer(view, text, as_json, quiet)


@views_app.command("remove")
def remove_view(name: ViewName, shared: Shared = False, as_json: Json = False, quiet: Quiet = False) -> None:
    """Delete a view."""
    api = config.connect()
    view = _found(api, name, shared)
    api.send("DELETE", _path(api, view))
    show_answer(view, _("View {name} deleted", name=clean(view["name"])), as_json, quiet)


def _path(api: config.Api, view: dict[str, Any]) -> str:
    return api.in_project("views", str(view["id"]))


def _found(api: config.Api, name: str, shared: bool = False) -> dict[str, Any]:
    """The view of this name: one's own before a shared one."""
    for view in sorted(api.get(api.in_project("views"))["items"], key=itemgetter("shared")):
        if view["name"] == name and (view["shared"] or not shared):
            found: dict[str, Any] = view
            return found
    raise CliError(_("there is no view {name}.", name=clean(name)), _("Yours: dstackweb view list"))
