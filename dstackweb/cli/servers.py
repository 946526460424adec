"""`dstackweb login`, `logout`, `servers` and `projects`: the servers that commands talk to, by name."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from operator import itemgetter
from typing import Annotated
from urllib.parse import urlsplit

import typer

from dstackweb.cli import config
from dstackweb.cli.completion import server_names
from dstackweb.cli.language import _, listed, word
from dstackweb.cli.options import Commands, Json, Quiet
from dstackweb.cli.output import GIVEN, CliError, UsageError, echo, note, warn
from dstackweb.cli.tables import Column, ItemColumns, Rows, rows_or, show_found
from dstackweb.lib.network import is_exposed

app = Commands("servers", help=_("Add, list and choose the servers that commands talk to."), no_args_is_help=True)

Token = Annotated[
    str, typer.Option(metavar="TEXT", help=_("API token. Default: DSTACKWEB_TOKEN; prompted for without one."))
]
Project = Annotated[
    str, typer.Option(metavar="TEXT", envvar="DSTACKWEB_PROJECT", help=_("Project that later commands use."))
]
Name = Annotated[str, typer.Argument(metavar="NAME", help=_("The server's name."), autocompletion=server_names)]


def login(
    url: Annotated[str, typer.Argument(metavar="URL", help=_("The server's URL. Default: DSTACKWEB_URL."))] = "",
    token: Token = "",
    project: Project = "",
) -> None:
    """Check an API token and save it for later commands, which then use this server.

    The server is saved under the name given with `--server`; without one under the name that it has already, or its
    host's. `dstackweb servers` lists, chooses and removes saved servers.
    """
    saved = _saved()
    name = GIVEN.get("server", "")
    if not url and name not in saved.servers:
        url = os.environ.get("DSTACKWEB_URL", "")
    server = saved.servers.get(name or saved.current)
    _save(name, url or (server.url if server else config.DEFAULT_URL), token, project)


@app.command(is_local=True)
def add(
    name: Name,
    url: Annotated[str, typer.Argument(metavar="URL", help=_("The server's URL."))],
    token: Token = "",
    project: Project = "",
) -> None:
    """Save another server under a name, after checking its API token. Later commands use it: see `servers use`."""
    _save(name, url, token, project)


def _save(name: str, url: str, token: str, project: str) -> None:
    from dstackweb.cli.client import Api

    url = config.normal_url(url)
    name = config.name_of(name or _saved().at(url) or urlsplit(url).netloc.rpartition("@")[2])
    if is_exposed(url):
        warn(_("{url} is not encrypted: others on the network can read the token. Use https:// if you can.", url=url))
    if not (token := token or config.environment_token(url)):
        if sys.stdin.isatty():
            note(_("Make a token on {url}", url=config.tokens_page(url)))
            token = typer.prompt(_("Token"), hide_input=True, err=True)
        else:
            token = sys.stdin.readline()
    token = token.strip()
    if not config.is_token(token):
        raise UsageError(
            _("invalid API token. Nothing was saved."), _("Make a token on {url}", url=config.tokens_page(url))
        )
    api = Api(config.Settings(url, token, config.DEFAULT_PROJECT, ""))
    user = api.get(api.path("user"))
    names = [item["name"] for item in api.get(api.path("projects"))["items"]]
    chosen = _choose_project(project, names)
    servers = _saved().servers | {name: config.Server(url, token, chosen)}
    path = config.store(config.Saved(name, servers))
    echo(_("Logged in to {url} as {user}, project {project}.", url=url, user=user["username"], project=chosen))
    if len(names) > 1 and not project:
        note(_("Your projects: {names}. To use another one: --project, or DSTACKWEB_PROJECT.", names=listed(names)))
    note(_("Saved as {name} in {file}, readable by you only.", name=name, file=path))


def _saved() -> config.Saved:
    """The saved servers; none where the file is damaged, which a login writes again."""
    try:
        return config.stored()
    except CliError:
        return config.Saved("", {})


def _choose_project(wanted: str, names: list[str]) -> str:
    if wanted and wanted not in names:
        raise CliError(
            _("there is no project {project}, or you are not a member of it. Nothing was saved.", project=wanted),
            _("Your projects: {names}", names=listed(names) or _("none")),
        )
    return wanted or (config.DEFAULT_PROJECT if config.DEFAULT_PROJECT in names or not names else names[0])


def logout() -> None:
    """Delete the saved token of the current server, or of the one given with `--server`."""
    name = GIVEN.get("server") or config.stored().current
    if not name:
        note(_("Not logged in."))
        return
    remove(name)


@app.command("list", is_local=True)
@app.command("ls", is_local=True, hidden=True)
def list_servers(as_json: Json = False, quiet: Quiet = False) -> None:
    """List the saved servers; the current one is marked."""
    saved = config.stored()
    items = [
        {"name": name, "url": server.url, "project": server.project, "current": name == saved.current}
        for name, server in saved.servers.items()
    ]
    columns: ItemColumns = {
        Column("NAME"): itemgetter("name"),
        Column("URL", wide=True): itemgetter("url"),
        Column("PROJECT"): itemgetter("project"),
        Column(): lambda one: _("current") if one["current"] else "",
    }
    view = rows_or(_("No servers. Add one: dstackweb login URL"), columns, items)
    show_found({"items": items, "next": None}, view, as_json, quiet, "name")


@app.command(is_local=True)
def use(
    name: Name,
    project: Annotated[str, typer.Option(metavar="TEXT", help=_("Also change the project that it uses."))] = "",
) -> None:
    """Make a saved server the one that later commands use."""
    saved = config.stored()
    server = saved.named(name)
    if project:
        server = replace(server, project=project)
    config.store(config.Saved(name, saved.servers | {name: server}))
    echo(_("Commands use {name}: {url}, project {project}.", name=name, url=server.url, project=server.project))


@app.command(is_local=True)
def remove(name: Name) -> None:
    """Delete a saved server with its token."""
    config.forget(name)
    echo(_("Logged out of {name}: its token is deleted from {file}.", name=name, file=config.config_path()))
    note(_("The token stays valid until you revoke it under Account → API tokens."))
    if current := config.stored().current:
        note(_("Commands now use {name}.", name=current))


def projects(as_json: Json = False, quiet: Quiet = False) -> None:
    """List your projects and your role in each."""
    api = config.connect()
    current = api.settings.project
    page = api.get(api.path("projects"))
    columns: ItemColumns = {
        Column("PROJECT"): itemgetter("name"),
        Column("ROLE"): lambda project: word(project["role"]),
        Column(): lambda project: _("current") if project["name"] == current else "",
    }
    show_found(page, [Rows.of(columns, page["items"])], as_json, quiet, "name")
