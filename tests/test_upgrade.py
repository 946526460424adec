"""Several servers on one database: their first start, and an upgrade while they run."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import dstackweb
from dstackweb.lib.process import REFUSED
from tests import servers
from tests.server import Server
from tests.setup_lock import set_up_elsewhere
from tests.support import REPO, eventually

pytestmark = [pytest.mark.nightly, pytest.mark.both_sides]

MakePlane = Callable[..., Server]


@pytest.fixture
def plane(open_home: Path) -> Iterator[MakePlane]:
    """`plane(name, tree)`: a server with a home of its own. All share database, broker and storage, with PostgreSQL
    through PgBouncer."""
    shared: dict[str, str] = {
        "DSTACKWEB_SECRET_KEY": "one key for all of them, long enough for Django",
        "DSTACKWEB_STORAGE": "database",
    }
    made: list[Server] = []
    pools: list[servers.Server] = []

    def make(name: str, tree: Path = REPO) -> Server:
        home = open_home / name
        home.mkdir()
        server = Server(home, migrated=False, tree=tree, DSTACKWEB_HOST_NAME=name, PYTHONPATH=str(tree), **shared)
        if not made:
            url = f"sqlite:///{open_home}/db.sqlite3"
            if "DATABASE_URL" in server.env:
                pools.append(servers.pgbouncer(open_home / "pgbouncer", server.env["DATABASE_URL"]))
                url = pools[0].url
            shared["DATABASE_URL"] = server.env["DATABASE_URL"] = url
            if "REDIS_URL" in server.env:
                shared["REDIS_URL"] = server.env["REDIS_URL"]
        if tree is not REPO:
            server.env["DSTACKWEB_STATIC_ROOT"] = ""
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()
        server.http.close()
    for pool in pools:
        pool.stop()


def version_of_program(folder: Path, version: int, compatible: int, *migrations: str) -> Path:
    """A checkout that declares this schema, with migrations of the app `lib` on top of the present ones."""
    folder.mkdir()
    shutil.copytree(REPO / "dstackweb", folder / "dstackweb", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "manage.py", folder)
    for name in ("templates", "static"):
        (folder / name).symlink_to(REPO / name)
    path = folder / "dstackweb" / "lib" / "schema.py"
    code = path.read_text()
    for name, value in (("VERSION", version), ("COMPATIBLE", compatible)):
        assert code.count(f"\n{name} = 1\n") == 1
        code = code.replace(f"\n{name} = 1\n", f"\n{name} = {value}\n")
    path.write_text(code)
    before = max(found.stem for found in path.parent.glob("migrations/0*.py"))
    for number, operation in enumerate(migrations, int(before[:4]) + 1):
        name = f"{number:04d}_step"
        (path.parent / "migrations" / f"{name}.py").write_text(
            "from django.db import migrations, models\n\n\nclass Migration(migrations.Migration):\n"
            f"    dependencies = [('lib', '{before}')]\n    operations = [{operation}]\n"
        )
        before = name
    return folder


def answers(server: Server) -> bool:
    """Whether its process lives, and serves pages that read the database."""
    assert server.process is not None
    assert server.process.poll() is None, server.said()
    try:
        return server.http.get("/hosts").status_code == 200
    except httpx.HTTPError:
        return False


def test_two_servers_that_start_on_one_empty_database_both_come_up_and_answer_alike(
    plane: MakePlane, open_home: Path
) -> None:
    first, second = plane("first"), plane("second")
    for server in (first, second):
        server.env["DSTACKWEB_STATIC_ROOT"] = str(open_home / "static")  # on a disk that both see
    with set_up_elsewhere(first.env["DATABASE_URL"]):
        first.launch()
        second.launch()
        for server in (first, second):
            eventually(lambda said=server.said: "another process is setting up this database" in said(), deadline=60)
    for server in (first, second):
        eventually(server.is_ready, deadline=120)
        assert "Traceback" not in server.said()
    items = first.http.get("/hosts").json()["items"]
    eventually(lambda: {host["name"] for host in first.http.get("/hosts").json()["items"]} == {"first", "second"})
    assert {host["name"] for host in items} <= {"first", "second"}
    code = archive_of("echo this is the code\n")
    digest = hashlib.sha256(code).hexdigest()
    first.api("PUT", f"archives/{digest}", content=code)
    config = {"type": "task", "commands": ["sh script.sh"]}
    names = [second.api("POST", "runs", json={"config": config, "archive": digest}).json()["name"] for _ in range(4)]
    for name in names:
        assert second.wait(name, deadline=60)["status"] == "done"
        assert first.log(name) == second.log(name) == b"this is the code\n"


def archive_of(script: str) -> bytes:
    """A working directory with this script.sh, packed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("script.sh")
        member.size = len(script)
        tar.addfile(member, io.BytesIO(script.encode()))
    return packed.getvalue()


@pytest.mark.postgres
def test_servers_are_upgraded_one_by_one_and_one_that_is_too_old_stops(plane: MakePlane, open_home: Path) -> None:
    """Expand, then contract: a column comes with the second version, and another goes with the third."""
    expand = "migrations.AddField('lease', 'note', models.CharField(max_length=9, null=True))"
    contract = "migrations.RemoveField('lease', 'note')"
    first = plane("first", version_of_program(open_home / "first-version", 1, 1))
    second = plane("second", version_of_program(open_home / "second-version", 2, 1, expand))
    third = plane("third", version_of_program(open_home / "third-version", 3, 2, expand, contract))

    first.start()
    second.start()
    assert answers(first)

    third.launch()
    assert first.process is not None
    assert first.process.wait(60) == REFUSED
    assert f"(dstackweb {dstackweb.__version__}, schema 1) is too old for the database" in first.said()
    assert "programs older than schema 2 stop now" in third.said()
    eventually(third.is_ready, deadline=120)
    assert answers(second)

    first.launch()
    assert first.process.wait(60) == REFUSED
    assert (
        first.said()
        .splitlines()[-1]
        .startswith(f"dstackweb: this program (dstackweb {dstackweb.__version__}, schema 1) is too old")
    )
    assert first.role_pids("dstackweb.manage") == []
    assert answers(second)
