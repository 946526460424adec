"""`dstackweb view`: filters of queues under a name, as on the queue's page."""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import view_names
from dstackweb.cli.language import _, listed
from dstackweb.cli.output import CliError, Json, Quiet, UsageError, clean, group, show_answer
from dstackweb.cli.tables import Column, ItemColumns, rows_or, show_found

app = group("Save filters of the project's queues under a name: your own, and those shared with all members.")
View = Annotated[str, typer.Argument(metavar="NAME", help="The view.", autocompletion=view_names)]
Shared = Annotated[bool, typer.Option("--shared", help="The view of all members; managers only.")]


@app.command("list")
@app.command("ls", hidden=True)
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


@app.command("save")
def save_view(
    name: View,
    search: Annotated[str, typer.Option("--search", metavar="TEXT", help="Runs with this in their name.")] = "",
    member: Annotated[str, typer.Option(help="Runs of this member.")] = "",
    needs: Annotated[str, typer.Option(metavar="CODE", help="Runs that need this, such as 2xA100 or 2xCPU.")] = "",
    reason: Annotated[
        str, typer.Option(metavar="CODE", help="Runs that wait for this, such as waiting_for_capacity.")
    ] = "",
    priority: Annotated[int | None, typer.Option(min=0, max=100, help="Runs of at least this priority.")] = None,
    group: Annotated[str, typer.Option(metavar="reason|member", help="Put runs of a reason or member together.")] = "",
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


@app.command("rename")
def rename_view(
    name: View,
    new_name: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    shared: Shared = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give a view another name."""
    api = config.connect()
    view = api.patch(_path(api, _found(api, name, shared)), {"name": new_name})
    show_answer(view, _("View {name} renamed to {new}", name=clean(name), new=clean(view["name"])), as_json, quiet)


@app.command("default")
def default_view(
    name: View,
    off: Annotated[bool, typer.Option("--off", help="Begin with the whole queue again.")] = False,
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


@app.command("remove")
def remove_view(name: View, shared: Shared = False, as_json: Json = False, quiet: Quiet = False) -> None:
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
