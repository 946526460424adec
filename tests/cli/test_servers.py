"""Several servers by name: saving, choosing and removing them, and which one a command talks to."""

from __future__ import annotations

import json
import shlex
import sys
from typing import NoReturn

import httpx
import pytest
from typer.testing import CliRunner

import dstackweb
from dstackweb.accounts.models import Project, User
from dstackweb.cli import client, config
from dstackweb.cli.client import Api
from dstackweb.cli.completion import run_names
from dstackweb.cli.main import app
from dstackweb.cli.manual import EXAMPLES
from dstackweb.cli.output import GIVEN
from tests.cli.conftest import Cli
from tests.cli.test_usage import COMMANDS
from tests.factories import join, make_host, make_project, make_run

SAVED_ONLY = {"DSTACKWEB_URL": None, "DSTACKWEB_TOKEN": None, "DSTACKWEB_PROJECT": None}
OTHER = "http://127.0.0.1:1"


@pytest.fixture
def saved(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Two servers: `here`, which answers and is used, and `away`, which has another token."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(cli.home))
    away = config.Server(OTHER, "dw_away", "zoo")
    config.store(config.Saved("here", {"away": away, "here": config.Server(cli.url, cli.token, "main")}))
    return cli


def test_the_servers_are_listed_without_their_tokens(saved: Cli) -> None:
    printed = saved("servers", "list")
    assert [line.split() for line in printed.stdout.splitlines()] == [
        ["NAME", "URL", "PROJECT"],
        ["away", OTHER, "zoo"],
        ["here", saved.url, "main", "current"],
    ]
    assert saved.ok("servers", "list", "-q") == "away\nhere\n"
    listed = json.loads(saved.ok("servers", "list", "--json"))
    assert listed["items"][1] == {"name": "here", "url": saved.url, "project": "main", "current": True}
    assert "dw_" not in printed.output + json.dumps(listed)


def test_adding_a_server_makes_it_the_current_one_and_keeps_the_others(cli: Cli) -> None:
    cli.ok("login", cli.url, "--token", cli.token, **SAVED_ONLY)
    cli.ok("servers", "add", "work", cli.url, "--token", cli.token, **SAVED_ONLY)
    assert cli.ok("servers", "list", "-q") == f"{cli.url.removeprefix('http://')}\nwork\n"
    assert "Commands use work" in cli.ok("servers", "use", "work")
    cli.ok("login", cli.url, "--server", "third", "--token", cli.token, **SAVED_ONLY)
    assert cli.ok("servers", "list", "-q").split()[-1] == "third"
    assert "invalid server name" in cli("servers", "add", "a b", cli.url, "--token", cli.token).stderr


def test_logging_in_again_keeps_the_name_of_a_server(saved: Cli) -> None:
    saved.ok("login", saved.url, "--token", saved.token, **SAVED_ONLY)
    assert saved.ok("servers", "list", "-q") == "away\nhere\n"


@pytest.mark.parametrize("place", ["before the command", "behind it", "in the environment"])
def test_a_command_talks_to_the_named_server(saved: Cli, ada: User, place: str) -> None:
    saved.ok("servers", "use", "away")
    args = {"before the command": ["--server", "here", "projects"], "behind it": ["projects", "--server", "here"]}
    env = {**SAVED_ONLY, "DSTACKWEB_SERVER": "here" if place == "in the environment" else None}
    assert "main" in saved.ok(*args.get(place, ["projects"]), **env)


def test_the_named_server_gets_its_own_token_and_not_that_of_the_environment(
    saved: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTACKWEB_TOKEN", "dw_environment")
    monkeypatch.setenv("DSTACKWEB_URL", saved.url)
    monkeypatch.setitem(GIVEN, "server", "away")
    assert config.load() == config.Settings(OTHER, "dw_away", "zoo", str(config.config_path()))


@pytest.mark.parametrize("command", [["login"], ["servers", "add", "work"]])
def test_a_login_elsewhere_does_not_send_the_token_of_the_environment(
    saved: Cli, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """It is for the server of DSTACKWEB_URL."""
    sent: list[str] = []

    def refuse(api: Api, _path: str) -> NoReturn:
        sent.append(api.settings.token)
        raise config.CliError("no")

    monkeypatch.setattr(Api, "get", refuse)
    saved(*command, OTHER, DSTACKWEB_URL=saved.url, DSTACKWEB_TOKEN="dw_environment", input="dw_typed\n")
    saved(*command, OTHER, DSTACKWEB_URL=f"{OTHER}/", DSTACKWEB_TOKEN="dw_environment")
    saved(*command, OTHER, DSTACKWEB_URL=None, DSTACKWEB_TOKEN="dw_environment")
    saved(*command, OTHER, "--token", "dw_given", DSTACKWEB_URL=saved.url, DSTACKWEB_TOKEN="dw_environment")
    assert sent == ["dw_typed", "dw_environment", "dw_environment", "dw_given"]


def test_a_login_to_a_named_server_ignores_the_url_of_the_environment(
    saved: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `--server away` would mean another server from then on."""
    sent: list[tuple[str, str]] = []

    def refuse(api: Api, _path: str) -> NoReturn:
        sent.append((api.settings.url, api.settings.token))
        raise config.CliError("no")

    monkeypatch.setattr(Api, "get", refuse)
    saved("login", "--server", "away", DSTACKWEB_TOKEN="dw_environment", input="dw_typed\n")
    assert sent == [(OTHER, "dw_typed")]


def test_the_saved_token_of_a_url_is_found_whichever_server_is_current(saved: Cli) -> None:
    saved.ok("servers", "use", "away")
    assert "main" in saved.ok("projects", DSTACKWEB_TOKEN=None, DSTACKWEB_PROJECT=None)


def test_an_unknown_server_is_named_with_those_that_are_saved(saved: Cli) -> None:
    for args in (["ps", "--server", "nope"], ["servers", "use", "nope"], ["logout", "--server", "nope"]):
        refused = saved(*args)
        assert refused.exit_code == 2
        assert "Saved servers: away, here" in refused.stderr


def test_another_project_is_used_for_one_command_or_for_later_ones(saved: Cli, ada: User) -> None:
    make_run(join_project("zoo", ada), ada, "lion")
    assert "lion" in saved.ok("ps", "--project", "zoo")
    assert "lion" not in saved.ok("ps")
    saved.ok("servers", "use", "here", "--project", "zoo")
    assert "lion" in saved.ok("ps", **SAVED_ONLY)


def join_project(name: str, user: User) -> Project:
    project = make_project(name)
    join(project, user)
    return project


def test_removing_the_current_server_makes_another_one_current(saved: Cli) -> None:
    printed = saved("logout")
    assert "Logged out of here" in printed.stdout
    assert "Commands now use away" in printed.stderr
    saved.ok("servers", "remove", "away")
    assert "Not logged in" in saved("logout").stderr
    assert not config.config_path().exists()


@pytest.mark.parametrize("text", ["url = [", "servers = 3", "[servers.a]\nurl = 'x'"])
def test_a_file_that_is_damaged_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(cli.home))
    config.write_private(config.config_path(), [text])
    refused = cli("ps", **SAVED_ONLY)
    assert refused.exit_code == 1
    assert "can't read" in refused.stderr


def test_every_example_of_the_help_is_a_command_with_these_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # as --watch wants it
    for path, examples in EXAMPLES.items():
        command = COMMANDS[tuple(path.split())]
        for line, _about in examples:
            words = shlex.split(line.partition(" < ")[0])[len(path.split()) :]
            command.make_context(path, words).close()
            GIVEN.clear()
        assert all(line.startswith(path) for line, _about in examples)
        shown = " ".join(CliRunner().invoke(app, [*path.split(), "--help"]).output.split())
        assert "Examples" in shown


@pytest.mark.parametrize(
    ("one", "other", "newer"),
    [("0.2.0", "0.1.9", True), ("0.10", "0.9", True), ("0.1.0", "0.1.0", False), ("0.1", "0.2", False),
     ("", "0.1", False), ("x", "0.1", False), ("1.0\x1b[2J", "0.1", True),
     ("0.1.0", "0.1.0rc1", True), ("0.1.0rc1", "0.1.0", False), ("0.1.0rc10", "0.1.0rc9", True),
     ("0.1.0rc1", "0.1.0b4", True), ("0.1.0rc1", "0.1.0rc1", False), ("0.2.0rc1", "0.1.0", True)],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers_and_a_candidate_comes_before_its_release(
    one: str, other: str, newer: bool
) -> None:
    assert client.is_newer(one, other) is newer


def test_a_newer_server_is_noticed_once_a_day_on_a_terminal_and_never_with_json(
    saved: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(newest: str = "9.0.0") -> str:
        client.notice(saved.url, newest)
        return capsys.readouterr().err

    assert printed() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(GIVEN, "form", "--json")
    assert printed() == ""
    monkeypatch.delitem(GIVEN, "form")
    assert printed(dstackweb.__version__) == printed("") == ""
    assert "has the newer version 9.0.0" in printed()
    assert printed() == ""
    client.notice("http://other", "9.0.0")
    assert "http://other has" in capsys.readouterr().err


def test_the_server_sends_its_version_to_signed_in_clients_only(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed: list[tuple[str, str]] = []
    monkeypatch.setattr("dstackweb.cli.client.notice", lambda *given: noticed.append(given))
    cli.ok("ps")
    cli("ps", DSTACKWEB_TOKEN="dw_wrong")
    assert noticed == [(cli.url, dstackweb.__version__), (cli.url, "")]


def complete(cli: Cli, line: str) -> list[str]:
    """What bash is offered at the end of the line."""
    env = {"_DSTACKWEB_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    result = CliRunner().invoke(app, [], prog_name="dstackweb", env={**cli.env, **env})
    return result.stdout.split()


@pytest.mark.parametrize("line", ["logs tr", "stop tr", "move other --before tr", "--project main logs tr"])
def test_the_names_of_runs_are_completed(cli: Cli, project: Project, ada: User, line: str) -> None:
    for name in ("train-a", "train-b", "retry-train"):
        make_run(project, ada, name)
    assert sorted(complete(cli, f"dstackweb {line}")) == ["train-a", "train-b"]


def test_queues_hosts_projects_and_servers_are_completed(saved: Cli, project: Project) -> None:
    make_host("box-1")
    assert complete(saved, "dstackweb queue d") == ["default"]
    assert complete(saved, "dstackweb host drain b") == ["box-1"]
    assert complete(saved, "dstackweb ps --project m") == ["main"]
    assert complete(saved, "dstackweb servers use a") == ["away"]


def test_completion_offers_no_name_that_a_shell_would_run(saved: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """zsh evaluates what it is offered."""
    rows = [
        {"name": "train-a", "status": "running"},
        {"name": "train-$(touch x)", "status": "running"},
        {"name": "train-b", "status": "\\$(touch x)`touch x`"},
        {"name": "train-é.1_x", "status": "done"},
    ]
    monkeypatch.setattr(Api, "get", lambda *_args, **_query: {"items": rows})
    offered = run_names("train")
    assert [name for name, _about in offered] == ["train-a", "train-b", "train-é.1_x"]
    assert dict(offered)["train-b"] == "touch xtouch x"


def test_a_server_that_gives_no_answer_completes_nothing(saved: Cli) -> None:
    saved.env |= {"DSTACKWEB_TOKEN": "dw_wrong"}
    assert complete(saved, "dstackweb logs tr") == []


def test_a_hasty_client_tries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(429, headers={"Retry-After": "1"}, json={"detail": "too many"})

    def sleep(_seconds: float) -> NoReturn:
        raise AssertionError

    settings = config.Settings("http://x", "dw_x", "main", "")
    api = Api(settings, transport=httpx.MockTransport(answer), sleep=sleep, patience_s=1)
    with pytest.raises(config.CliError):
        api.get("/api/v1/user")
    assert asked == ["/api/v1/user"]


def test_lists_have_one_verb_and_only_commands_that_name_a_server_do_not_choose_one() -> None:
    groups = {path[0] for path in COMMANDS if len(path) == 2}
    assert groups == {"host", "key", "servers", "view"}
    for group in groups:
        assert (COMMANDS[group, "list"].hidden, COMMANDS[group, "ls"].hidden) == (False, True)
    local = {
        " ".join(path) for path, command in COMMANDS.items() if "server" not in {one.name for one in command.params}
    }
    on_servers = {f"servers {verb}" for verb in ("list", "ls", "add", "use", "remove")}
    assert local == {"version", "host join", "host run", *on_servers}
