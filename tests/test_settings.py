"""Settings from the environment: typed, documented, and loud when they can't be used."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from dstackweb import env
from tests.factories import make_user
from tests.support import REPO

READ_SETTINGS = """
import json, sys
from dstackweb import settings
print(json.dumps({name: getattr(settings, name) for name in sys.argv[1:]}, default=str))
"""


OTHERS = {"DATABASE_URL", "REDIS_URL", "DJANGO_ALLOW_ASYNC_UNSAFE"}
"""Of the tests' own environment; the last is that of browsers' tests."""


def start(home: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DSTACKWEB_")}
    clean = {name: value for name, value in clean.items() if name not in OTHERS}
    return subprocess.run(
        [sys.executable, *argv], cwd=REPO, capture_output=True, text=True, check=False,
        env={**clean, "DJANGO_SETTINGS_MODULE": "dstackweb.settings", "DSTACKWEB_HOME": str(home), **variables},
    )  # fmt: skip


def settings(home: Path, *names: str, **variables: str) -> dict[str, Any]:
    done = start(home, "-c", READ_SETTINGS, *names, **variables)
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    return values


@pytest.mark.parametrize(
    ("read", "bad", "expected"),
    [
        (lambda name: env.integer(name, 1, most=9), "ten", "a whole number from 0 to 9"),
        (lambda name: env.integer(name, 1, most=9), "10", "a whole number from 0 to 9"),
        (lambda name: env.seconds(name, 1), "0", "seconds above 0"),
        (lambda name: env.seconds(name, 1), "nan", "seconds above 0"),
        (lambda name: env.seconds(name, 1, least=0.1, most=20), "0.01", "seconds from 0.1 to 20"),
        (lambda name: env.numbers(name, least=1, most=9, example="a=2"), "a=0", "such as a=2; numbers are from 1 to 9"),
        (lambda name: env.numbers(name, least=1, most=9, example="a=2"), "a", "name=number,…"),
        (lambda name: env.boolean(name), "maybe", "1, true, yes or on"),
        (lambda name: env.url(name, "https", example="https://x.org"), "ftp://x.org", "such as https://x.org"),
        (lambda name: env.url(name, "https", example="https://x.org"), "https://", "such as https://x.org"),
        (lambda name: env.text(name, pattern="[a-z]+", expected="letters"), "a b", "letters"),
        (env.group_roles, "ops=main", "such as ml-team=main:member"),
        (env.group_roles, "ops=main:owner", "viewer, member, manager, admin"),
        (env.group_roles, "=main:admin", "such as ml-team=main:member"),
        (env.issuer, "http://login.example.org", "a URL with https"),
        (lambda name: env.mailer(name), "smtp://mail.example.org", "from=gpus@example.org"),
        (lambda name: env.mailer(name), "smtp://?from=gpus@example.org", "from=gpus@example.org"),
        (lambda name: env.mailer(name), "http://mail.example.org?from=a@example.org", "from=gpus@example.org"),
    ],
)
def test_an_invalid_value_is_reported_with_its_variable_and_the_expected_one(
    monkeypatch: pytest.MonkeyPatch, read: Any, bad: str, expected: str
) -> None:
    monkeypatch.setitem(os.environ, "A_SETTING", bad)
    monkeypatch.setattr(env, "READ", {})

    with pytest.raises(env.BadSetting, match=re.escape(expected)) as raised:
        read("A_SETTING")

    assert str(raised.value).startswith(f"A_SETTING={bad!r}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("wrong", ["0.0001", "60", "inf"])
def test_gpus_are_read_often_enough_for_the_shortest_policy(tmp_path: Path, wrong: str) -> None:
    done = start(tmp_path, "-c", READ_SETTINGS, "DSTACKWEB_SAMPLE_EVERY_S", DSTACKWEB_SAMPLE_EVERY_S=wrong)
    assert done.returncode != 0
    assert "seconds from 0.1 to 20" in done.stderr


@pytest.mark.parametrize(
    ("url", "port", "user", "password", "tls_at_once", "starttls"),
    [
        ("smtp://gpu%40lab:p%40ss@mail.example.org?from=gpus@example.org", 587, "gpu@lab", "p@ss", False, True),
        ("smtps://mail.example.org?from=gpus@example.org", 465, "", "", True, False),
        ("smtp://localhost:25?from=gpus@example.org", 25, "", "", False, False),
    ],
)
def test_mails_are_encrypted_unless_the_mail_server_is_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, url: str, port: int, user: str, password: str, tls_at_once: bool, starttls: bool
) -> None:
    monkeypatch.setitem(os.environ, "A_SETTING", url)
    monkeypatch.setattr(env, "READ", {})
    found = env.mailer("A_SETTING")
    assert (found.port, found.user, found.password) == (port, user, password)
    assert (found.tls_at_once, found.starttls, found.sender) == (tls_at_once, starttls, "gpus@example.org")


def test_the_password_of_a_mail_server_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "A_SETTING", "smtp://gpus:hunter2@mail.example.org")
    with pytest.raises(env.BadSetting) as raised:
        env.mailer("A_SETTING")
    assert "hunter2" not in str(raised.value)


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "A_SETTING", " ")
    monkeypatch.setattr(env, "READ", {})

    assert env.integer("A_SETTING", 7) == 7


def test_a_file_has_further_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text('# ours\n\nA_SETTING=7\nANOTHER="x = 1"\nGIVEN_ALREADY=2\n')
    monkeypatch.setattr(os, "environ", {"DSTACKWEB_ENV_FILE": str(file), "GIVEN_ALREADY": "1"})
    monkeypatch.setattr(env, "GIVEN", {})

    env.load_file()

    assert (os.environ["A_SETTING"], os.environ["ANOTHER"]) == ("7", "x = 1")
    assert os.environ["GIVEN_ALREADY"] == "1"
    assert set(env.GIVEN) == {"DSTACKWEB_ENV_FILE", "GIVEN_ALREADY"}


@pytest.mark.parametrize(("text", "expected"), [("A=1\nexport B=2\n", "NAME=value in line 2"), (None, "can read")])
def test_an_invalid_settings_file_is_reported_with_its_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, expected: str
) -> None:
    if text is not None:
        (tmp_path / "settings").write_text(text)
    monkeypatch.setattr(os, "environ", {"DSTACKWEB_ENV_FILE": str(tmp_path / "settings")})
    monkeypatch.setattr(env, "GIVEN", {})

    with pytest.raises(env.BadSetting, match=expected):
        env.load_file()


def test_the_password_in_a_bad_address_is_not_shown(tmp_path: Path) -> None:
    done = start(tmp_path, "manage.py", "check", DATABASE_URL="mysql://ada:hunter2@db/x")

    assert "DATABASE_URL" in done.stderr
    assert "hunter2" not in done.stderr


def test_a_command_reports_an_invalid_setting_in_one_line_and_fails(tmp_path: Path) -> None:
    done = start(tmp_path, "manage.py", "up", DSTACKWEB_PORT="eighty")

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "dstackweb: DSTACKWEB_PORT='eighty': expected a whole number from 1 to 65535\n"


def test_a_home_that_is_not_a_directory_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    done = start(tmp_path / "file", "manage.py", "up")

    assert done.returncode == 1
    assert done.stderr.startswith("dstackweb: DSTACKWEB_HOME=")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "shares"),
    [
        ({}, True),
        ({"DSTACKWEB_HOST": "::1", "DSTACKWEB_PUBLIC_URL": "http://127.0.0.1:8000"}, True),
        ({"DSTACKWEB_HOST": "0.0.0.0"}, False),
        ({"DSTACKWEB_PUBLIC_URL": "https://gpus.example.org"}, False),
        ({"DSTACKWEB_ALLOWED_HOSTS": "localhost,gpus.example.org"}, False),
        ({"DSTACKWEB_TRUSTED_PROXIES": "127.0.0.1"}, False),
        ({"DSTACKWEB_GATEWAY_URL": "https://dev.example.org"}, False),
        ({"DSTACKWEB_SSH_HOST": "dev.example.org"}, False),
        ({"DSTACKWEB_OIDC_URL": "https://id.example.org", "DSTACKWEB_OIDC_CLIENT_ID": "dstackweb"}, False),
        ({"DSTACKWEB_SHARED_UID": "0"}, False),
        ({"DSTACKWEB_HOST": "0.0.0.0", "DSTACKWEB_SHARED_UID": "1"}, True),
    ],
)
def test_jobs_may_share_the_servers_user_only_where_no_one_else_can_reach_it(
    tmp_path: Path, variables: dict[str, str], shares: bool
) -> None:
    assert settings(tmp_path, "DSTACKWEB_SHARED_UID", **variables) == {"DSTACKWEB_SHARED_UID": shares}


def test_the_docs_list_exactly_the_settings_that_are_read(tmp_path: Path) -> None:
    code = "import dstackweb.settings, json; from dstackweb import env; print(json.dumps(list(env.READ)))"
    read = json.loads(start(tmp_path, "-c", code).stdout)
    documented = re.findall(r"^\| `([A-Z_]+)` \|", (REPO / "docs" / "settings.md").read_text(), re.MULTILINE)

    assert sorted(documented) == sorted(read)


@pytest.mark.slow
def test_starts_at_the_same_moment_agree_on_one_secret_key_that_only_the_owner_reads(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        keys = list(pool.map(lambda _: settings(tmp_path, "SECRET_KEY")["SECRET_KEY"], range(4)))

    assert len(set(keys)) == 1
    assert len(keys[0]) >= 50
    assert stat.S_IMODE((tmp_path / "secret_key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "db.sqlite3").stat().st_mode) == 0o600
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".secret_key")]


def test_everything_follows_the_public_address(tmp_path: Path) -> None:
    names = ["ALLOWED_HOSTS", "CSRF_TRUSTED_ORIGINS", "SESSION_COOKIE_SECURE", "DSTACKWEB_API_URL"]

    public = settings(tmp_path, *names, DSTACKWEB_PUBLIC_URL="https://gpus.example.org/")
    local = settings(tmp_path, *names, DSTACKWEB_PORT="8123", DSTACKWEB_HOST="0.0.0.0")

    assert "gpus.example.org" in public["ALLOWED_HOSTS"]
    assert public["CSRF_TRUSTED_ORIGINS"] == ["https://gpus.example.org"]
    assert public["SESSION_COOKIE_SECURE"] is True
    assert public["DSTACKWEB_API_URL"] == "https://gpus.example.org"
    assert local["SESSION_COOKIE_SECURE"] is False
    assert local["DSTACKWEB_API_URL"] == "http://127.0.0.1:8123"
    assert "*" not in local["ALLOWED_HOSTS"]


def test_redis_replaces_the_database_for_caches_and_tasks(tmp_path: Path) -> None:
    without = settings(tmp_path, "CACHES", "Q_CLUSTER")
    redis = settings(tmp_path, "CACHES", "Q_CLUSTER", REDIS_URL="redis://127.0.0.1:6379/0")

    assert without["Q_CLUSTER"]["orm"] == "default"
    assert {cache["BACKEND"].rsplit(".", 1)[1] for cache in without["CACHES"].values()} == {"RowCache"}
    assert redis["Q_CLUSTER"]["redis"].startswith("redis://127.0.0.1:6379/0?")
    assert "orm" not in redis["Q_CLUSTER"]
    assert {cache["BACKEND"].rsplit(".", 1)[1] for cache in redis["CACHES"].values()} == {"RedisCache"}


def test_a_cut_connection_times_out_on_both_sides(tmp_path: Path) -> None:
    """Rows that a vanished host has locked, and a host that waits for an answer, must not wait for hours."""
    urls = {"DATABASE_URL": "postgresql://me@db/name?connect_timeout=3", "REDIS_URL": "redis://r/1?socket_timeout=2"}
    found = settings(tmp_path, "DATABASES", "Q_CLUSTER", **urls)

    options = found["DATABASES"]["default"]["OPTIONS"]
    assert (options["connect_timeout"], options["tcp_user_timeout"]) == (3, 25_000)
    assert "tcp_keepalives_idle=10" in options["options"]
    assert "idle_in_transaction_session_timeout=10000" in options["options"]
    assert found["Q_CLUSTER"]["redis"] == "redis://r/1?socket_timeout=2&socket_connect_timeout=5&socket_keepalive=true"


def test_through_a_pgbouncer_nothing_lasts_longer_than_a_transaction(tmp_path: Path) -> None:
    found = settings(tmp_path, "DATABASES", DATABASE_URL="postgresql://me@db/name?pgbouncer=true")["DATABASES"][
        "default"
    ]
    assert found["DISABLE_SERVER_SIDE_CURSORS"]
    assert not {"pgbouncer", "options"} & set(found["OPTIONS"])
    assert found["OPTIONS"]["tcp_user_timeout"] == 25_000


def test_no_process_loads_what_only_a_call_needs(tmp_path: Path) -> None:
    """Clients of clouds and clusters, and what collects static files: a third of the time in which a process starts."""
    code = """
import sys, django
django.setup()
import dstackweb.urls, dstackweb.backends.registry, dstackweb.backends.aws.kind, dstackweb.backends.aws.errors
print({name.partition(".")[0] for name in sys.modules} & {"boto3", "botocore", "httpx", "requests", "tinycss2"})
"""
    assert start(tmp_path, "-c", code).stdout == "set()\n"


def test_only_what_serves_pages_loads_the_admin_and_only_what_uses_redis_loads_it(tmp_path: Path) -> None:
    code = """
import sys, django
django.setup()
import dstackweb.scheduler.processes.brokers, dstackweb.scheduler.management.commands.up
print({"redis", "django_redis", "dstackweb.web.admin.site"} & set(sys.modules))
"""
    assert start(tmp_path, "-c", code).stdout == "set()\n"


@pytest.mark.nightly
def test_single_sign_on_is_installed_with_its_address(tmp_path: Path) -> None:
    code = """
import django
django.setup()
from allauth.socialaccount.providers import registry
print(registry.get_class_list())
"""
    given = {"DSTACKWEB_OIDC_URL": "https://id.example.org", "DSTACKWEB_OIDC_CLIENT_ID": "dstackweb"}
    assert "OpenIDConnectProvider" in start(tmp_path, "-c", code, **given).stdout
    assert start(tmp_path, "-c", code).stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dstackweb", "host-box"])
def test_a_cluster_of_any_name_starts(tmp_path: Path, name: str) -> None:
    code = "import django; django.setup(); from django_q.conf import Conf; print(Conf.CLUSTER_NAME, Conf.PREFIX)"

    done = start(tmp_path, "-c", code, Q_CLUSTER_NAME=name)

    assert done.stdout.split() == [name, "dstackweb"], done.stderr


@pytest.mark.django_db
def test_pages_and_admin_allow_no_inline_code(client: Client) -> None:
    for address in ("/login/", "/admin/"):
        if address == "/admin/":
            client.force_login(make_user("root", is_superuser=True, is_staff=True))
        response = client.get(address)
        policy = response.headers["Content-Security-Policy"]
        body = response.content.decode()

        assert response.status_code == 200
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<style|<script(?![^>]*\ssrc=)(?![^>]*application/json)|\son\w+=|\sstyle=", body)
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["X-Frame-Options"] == "DENY"


ASK = """
import sys
from django.test import RequestFactory
from dstackweb.wsgi import application

for path in sys.argv[1:]:
    for scheme in ("http", "https"):
        environ = RequestFactory(headers={"Host": "127.0.0.1:8000", "X-Forwarded-Proto": scheme}).get(path).environ
        said = []
        application(environ, lambda status, headers: said.extend([status, dict(headers)]))
        print(path, scheme, said[0][:3], said[1].get("Location"), said[1].get("Strict-Transport-Security"))
"""


@pytest.mark.nightly
def test_with_https_browsers_are_redirected_and_local_programs_still_answered(tmp_path: Path) -> None:
    public = {"DSTACKWEB_PUBLIC_URL": "https://gpus.example.org:8443"}
    checked = start(tmp_path, "manage.py", "check", "--deploy", "--fail-level", "WARNING", **public)
    assert "no issues" in checked.stdout, checked.stderr
    assert checked.returncode == 0
    done = start(tmp_path, "-c", ASK, "/p/main/queue/?a=1", "/healthz", "/api/v1/projects", **public)
    assert done.stdout.splitlines() == [
        "/p/main/queue/?a=1 http 301 https://gpus.example.org:8443/p/main/queue/?a=1 None",
        "/p/main/queue/?a=1 https 302 /login/?next=/p/main/queue/%3Fa%3D1 max-age=31536000",
        "/healthz http 200 None None",
        "/healthz https 200 None max-age=31536000",
        "/api/v1/projects http 401 None None",
        "/api/v1/projects https 401 None max-age=31536000",
    ], done.stderr


def test_without_https_nothing_is_redirected(tmp_path: Path) -> None:
    names = ("SECURE_SSL_REDIRECT", "SECURE_HSTS_SECONDS", "SESSION_COOKIE_SECURE", "SECURE_PROXY_SSL_HEADER")
    for public in ("", "http://gpus.example.org"):
        assert list(settings(tmp_path, *names, DSTACKWEB_PUBLIC_URL=public).values()) == [False, 0, False, None]
