"""A server doesn't start on a database or a Redis that jobs could write to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from django.conf import settings
from django_q import core_signing as signing
from django_q.conf import Conf
from django_q.signing import PickleSerializer, SignedPackage
from hypothesis import given, strategies as st

from dstackweb.scheduler.processes import protection
from tests import servers
from tests.support import REPO, deployment_env, eventually

SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[servers.Server]:
    server = servers.redis(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
def open_redis(redis: servers.Server) -> servers.Server:
    redis.stop()
    redis.argv = redis.argv[:-2]
    return redis.start()


def without_password(server: servers.Server) -> str:
    return server.url.replace(f":{servers.PASSWORD}@", "")


def test_a_redis_with_a_password_is_protected(redis: servers.Server) -> None:
    assert protection.refusal(SQLITE, redis.url) is None


def test_a_redis_without_a_password_is_refused_also_when_the_url_has_one(open_redis: servers.Server) -> None:
    for url in (without_password(open_redis), open_redis.url):
        found = protection.refusal(SQLITE, url)
        assert found is not None
        assert "requirepass" in found


def test_a_socket_is_protected_if_only_the_servers_user_may_write_to_it(redis: servers.Server, tmp_path: Path) -> None:
    redis.stop()
    path = tmp_path / "redis.sock"
    redis.argv = [*redis.argv[:-2], "--unixsocket", str(path), "--unixsocketperm", "700"]
    redis.start()
    assert protection.refusal(SQLITE, f"unix://{path}") is None
    path.chmod(0o777)
    assert "needs no password" in str(protection.refusal(SQLITE, f"unix://{path}"))


@pytest.mark.parametrize("url", ["redis://:dstackweb@r:6379/0", "redis://cache:Cache@r/0", "rediss://:changeme@r/1"])
def test_a_password_of_redis_that_can_be_guessed_is_refused(url: str) -> None:
    assert "can be guessed" in str(protection.refusal(SQLITE, url))


@pytest.mark.parametrize("password", ["gpus", "team", "dstackweb", "Postgres"])
def test_a_password_of_postgresql_that_can_be_guessed_is_refused(password: str) -> None:
    database = {"ENGINE": "django.db.backends.postgresql", "HOST": "db", "USER": "gpus", "PASSWORD": password}
    found = str(protection.refusal({**database, "NAME": "team"}, ""))
    assert "can be guessed" in found
    assert 'ALTER ROLE "gpus" PASSWORD' in found


@given(
    st.sampled_from(["redis", "rediss"]),
    st.text("abc:@/%", max_size=5),
    st.text("abcXYZ-_", min_size=1, max_size=20),
    st.sampled_from(["", "?socket_timeout=3", "?password=abcXYZ&ssl_keyfile=k&db=2"]),
)
def test_no_credentials_of_an_address_are_used_to_see_whether_it_needs_any(
    scheme: str, user: str, password: str, query: str
) -> None:
    url = f"{scheme}://{quote(user, safe='')}:{quote(password)}@host:6379/0{query}"
    bare = protection._without_credentials(url)
    assert bare.startswith(f"{scheme}://host:6379/0")
    assert not {"@", "password", "ssl_keyfile"} & set(bare.replace("?", "&").replace("=", "&").split("&"))
    assert "@" not in bare


@pytest.mark.slow
def test_a_postgresql_that_trusts_all_is_refused_and_one_with_passwords_is_not(open_home: Path) -> None:
    server = servers.postgres(open_home / "postgres")
    database = {
        "ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "PORT": server.port, "USER": "postgres",
        "PASSWORD": servers.PASSWORD, "NAME": "postgres",
    }  # fmt: skip
    try:
        assert protection.refusal(database, "") is None
        rules = open_home / "postgres" / "data" / "pg_hba.conf"
        rules.write_text(rules.read_text().replace("password", "trust"))
        server.stop()
        server.start()
        # A server that is still starting takes connections without looking at passwords.
        assert "scram-sha-256" in eventually(lambda: protection.refusal(database, ""))
    finally:
        server.stop()


@pytest.mark.slow
def test_a_server_says_what_to_do_and_ends(open_redis: servers.Server, open_home: Path) -> None:
    env = deployment_env(open_home) | {"REDIS_URL": without_password(open_redis)}
    done = subprocess.run(
        [sys.executable, "manage.py", "up", "--prepare"], cwd=REPO, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("as in redis://:PASSWORD@host:6379/0")
    assert len(done.stderr.strip().splitlines()) == 1


def test_tasks_are_signed_with_a_key_that_signs_nothing_else() -> None:
    assert SignedPackage.loads(SignedPackage.dumps(["a task"])) == ["a task"]
    forged = signing.dumps(["a task"], key=settings.SECRET_KEY, salt=Conf.PREFIX, serializer=PickleSerializer)
    with pytest.raises(signing.BadSignature):
        SignedPackage.loads(forged)
