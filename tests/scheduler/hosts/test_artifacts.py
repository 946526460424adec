"""What a real run leaves is kept by a real server."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.server import Server

pytestmark = pytest.mark.slow


def test_what_a_run_leaves_is_kept_though_it_fails_and_goes_with_it(open_home: Path) -> None:
    with Server(open_home) as server:
        name = server.submit(
            'cd "$DSTACKWEB_ARTIFACTS"; mkdir plots; printf "a,b\\n1,2\\n" > plots/m.csv; ln -s /etc/passwd users',
            'cd "$DSTACKWEB_ARTIFACTS"; head -c 3000000 /dev/urandom > model; sha256sum < model; exit 3',
            resources={"cpu": 1},
        )
        assert server.wait(name)["exit_code"] == 3
        listed = server.api("GET", f"runs/{name}/artifacts").json()
        assert [(one["path"], one["size"]) for one in listed["items"]] == [("model", 3_000_000), ("plots/m.csv", 8)]
        assert [(one["path"], one["why"]) for one in listed["left_out"]] == [("users", "kind")]
        model = server.api("GET", f"runs/{name}/artifacts/file", params={"path": "model"})
        assert hashlib.sha256(model.content).hexdigest() in server.log(name).decode()
        part = server.api(
            "GET", f"runs/{name}/artifacts/file", params={"path": "plots/m.csv"}, headers={"Range": "bytes=4-"}
        )
        assert (part.status_code, part.content) == (206, b"1,2\n")
        kept = [path for path in (server.home / "artifacts").rglob("*") if path.is_file()]
        assert len(kept) == 2
        assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
        server.api("DELETE", f"runs/{name}")
        assert [path for path in (server.home / "artifacts").rglob("*") if path.is_file()] == []
