"""Whatever a client sends, the API answers with a status of its own, in the form that it describes, and goes on."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import TOKEN, Server

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.both_sides,
    pytest.mark.postgres,
]  # which refuses more values than SQLite

# What exists, so that requests get past the first 404.
NAMED = """
[parameters]
project = "main"
sha256 = "{sha256}"
invite_id = {invite_id}
[[operations]]
include-path-regex = "/queues/"
parameters = {{"path.name" = "default"}}
[[operations]]
include-path-regex = "/projects/.*/runs/"
parameters = {{"path.name" = "target"}}
[[operations]]
include-path-regex = "/hosts/"
parameters = {{"path.name" = "box"}}
[[operations]]
include-path-regex = "/backends/"
parameters = {{"path.name" = "hosts"}}
"""
CODE = b"\x1f\x8bcode"
PEOPLE = """
import hashlib
import json
from dstackweb.accounts.models import Membership, Project, User
from dstackweb.accounts.services import create_token

found = {}
for role in ("viewer", "member"):
    user = User.objects.create_user(f"a-{role}")
    Membership.objects.create(user=user, project=Project.objects.get(name="main"), role=role)
    found[role] = create_token(user, "test")[1]
print("TOKENS", json.dumps(found), flush=True)
"""


@pytest.fixture
def server(open_home: Path) -> Iterator[Server]:
    """A deployment of its own: random requests hold its hosts, drain its queue, and more."""
    with Server(open_home) as server:
        yield server


def test_no_request_breaks_the_server_or_is_answered_in_another_form(server: Server, tmp_path: Path) -> None:
    """All that schemathesis thinks of as a deployment admin, and a few requests with less or no rights.

    What each role may do is for tests/test_permissions.py.
    """
    server.submit("true", name="target")
    sha256 = hashlib.sha256(CODE).hexdigest()
    server.api("PUT", f"archives/{sha256}", content=CODE)
    invite = server.http.post("/hosts/invites").json()["id"]
    (tmp_path / "schemathesis.toml").write_text(NAMED.format(sha256=sha256, invite_id=invite))
    people = json.loads(server.manage("shell", "-v", "0", "-c", PEOPLE).stdout.partition("TOKENS")[2])
    many = "15" if "DATABASE_URL" in server.env else "8"
    failed = {
        role: problem
        for role, token, phases, most in (
            *((role, token, "fuzzing", "2") for role, token in {"anonymous": "none", **people}.items()),
            ("deployment admin", TOKEN, "examples,coverage,fuzzing", many),
        )
        if (problem := problems(server, tmp_path, token, phases, most))
    }
    assert failed == {}


def problems(server: Server, folder: Path, token: str, phases: str, most: str) -> str:
    """What schemathesis found wrong in the answers to this token."""
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/api/v1/openapi.json",
            "--checks", "not_a_server_error,response_schema_conformance,content_type_conformance",
            "--max-examples", most, "--phases", phases,
            "--header", f"Authorization: Bearer {token}", "--suppress-health-check", "all", "--no-color",
        ],
        cwd=folder, capture_output=True, text=True, timeout=420, check=False,
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stdout[-6000:]
