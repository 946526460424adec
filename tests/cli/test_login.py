from __future__ import annotations

import stat
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dstackweb.accounts.models import User
from dstackweb.cli.config import normal_url
from dstackweb.cli.main import app
from tests.cli.conftest import Cli
from tests.factories import join, make_project, make_user
from tests.support import free_port

NOTHING_SET = {"DSTACKWEB_URL": None, "DSTACKWEB_TOKEN": None, "DSTACKWEB_PROJECT": None}


def config(cli: Cli) -> Path:
    return cli.home / "dstackweb" / "config.toml"


def test_login_checks_the_token_and_stores_it_readable_only_by_its_user(cli: Cli) -> None:
    printed = cli.ok("login", cli.url, "--token", cli.token, **NOTHING_SET)
    assert printed == f"Logged in to {cli.url} as ada, project main.\n"
    server = {"url": cli.url, "token": cli.token, "project": "main"}
    name = cli.url.removeprefix("http://")
    assert tomllib.loads(config(cli).read_text()) == {"current": name, "servers": {name: server}}
    assert stat.S_IMODE(config(cli).stat().st_mode) == 0o600
    assert [file.name for file in config(cli).parent.iterdir()] == ["config.toml"]
    assert "main" in cli.ok("projects", **NOTHING_SET)


def test_the_token_may_be_piped_and_is_never_printed(cli: Cli) -> None:
    result = cli("login", cli.url, input=f"{cli.token}\n", **NOTHING_SET)
    assert result.exit_code == 0, result.output
    assert cli.token not in result.output
    assert cli.token in config(cli).read_text()


def test_a_bad_token_is_refused_and_the_stored_one_stays(cli: Cli) -> None:
    cli.ok("login", cli.url, "--token", cli.token, **NOTHING_SET)
    before = config(cli).read_text()
    result = cli("login", cli.url, "--token", "dw_wrong", **NOTHING_SET)
    assert result.exit_code == 1
    assert "rejected the token" in result.stderr
    assert config(cli).read_text() == before


def test_a_token_that_no_header_can_carry_is_refused_before_it_is_sent(cli: Cli) -> None:
    for token in ("päss", "a\x1bb", "a b", "  "):
        assert cli("ps", DSTACKWEB_TOKEN=token).exit_code == 2
        result = cli("login", cli.url, "--token", token, **NOTHING_SET)
        assert (result.exit_code, config(cli).exists()) == (2, False)
        assert "invalid API token" in result.stderr


@pytest.mark.usefixtures("live_server")
def test_an_unreachable_server_is_one_line_and_exit_code_3(cli: Cli) -> None:
    result = cli("login", f"http://127.0.0.1:{free_port()}", "--token", "dw_x", **NOTHING_SET)
    assert result.exit_code == 3
    assert "connection refused" in result.stderr
    assert "Traceback" not in result.output


def test_the_project_is_the_given_one_or_main_or_the_only_one(connect: Callable[..., Cli], ada: User) -> None:
    join(make_project("research"), ada)
    cli = connect(ada)
    result = cli("login", cli.url, "--token", cli.token, **NOTHING_SET)
    assert "project main." in result.stdout
    assert "Your projects: main, research" in result.stderr
    assert "project research." in cli.ok("login", cli.url, "--token", cli.token, "--project", "research", **NOTHING_SET)
    other = connect(join(make_project("zoo"), make_user("bob")))
    assert "project zoo." in other.ok("login", other.url, "--token", other.token, **NOTHING_SET)
    refused = cli("login", cli.url, "--token", cli.token, "--project", "zoo", **NOTHING_SET)
    assert refused.exit_code == 1
    assert "Your projects: main, research" in refused.stderr


def test_the_environment_overrides_the_stored_settings(cli: Cli) -> None:
    cli.ok("login", cli.url, "--token", cli.token, **NOTHING_SET)
    refused = cli("projects", DSTACKWEB_TOKEN="dw_other", DSTACKWEB_URL=None)
    assert refused.exit_code == 1
    assert "(from DSTACKWEB_TOKEN)" in refused.stderr


def test_a_stored_token_is_never_sent_to_another_server(cli: Cli) -> None:
    cli.ok("login", cli.url, "--token", cli.token, **NOTHING_SET)
    refused = cli("projects", DSTACKWEB_URL="http://127.0.0.1:1", DSTACKWEB_TOKEN=None)
    assert refused.exit_code == 2
    assert "No token was sent" in refused.stderr


def test_logout_deletes_the_token_and_warns_that_it_stays_valid(cli: Cli) -> None:
    cli.ok("login", cli.url, "--token", cli.token, **NOTHING_SET)
    result = cli("logout")
    assert not config(cli).exists()
    assert "until you revoke it" in result.stderr
    assert "Not logged in" in cli("logout").stderr
    assert cli("projects", **NOTHING_SET).exit_code == 2


def test_a_damaged_configuration_is_named_and_replaced_by_login(cli: Cli) -> None:
    config(cli).parent.mkdir(parents=True)
    config(cli).write_text("url = [")
    refused = cli("projects", **NOTHING_SET)
    assert refused.exit_code == 1
    assert str(config(cli)) in refused.stderr
    cli.ok("login", cli.url, "--token", cli.token, **NOTHING_SET)
    cli.ok("projects", **NOTHING_SET)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("gpu.example.org", "https://gpu.example.org"),
        ("https://example.org/dstackweb/", "https://example.org/dstackweb"),
    ],
)
def test_an_address_without_a_scheme_is_https_except_on_this_machine(given: str, meant: str) -> None:
    assert normal_url(given) == meant


@pytest.mark.parametrize(
    "given", ["http://", "ftp://x", "http://x:port", "http://x:99999", "http://[::1", "http://x\x07"]
)
def test_an_invalid_url_is_a_usage_error(given: str) -> None:
    assert CliRunner().invoke(app, ["login", given, "--token", "dw_x"]).exit_code == 2
