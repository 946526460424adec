"""dstackweb host: looking after hosts, and what keeps a machine from hosts."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts import inventory
from dstackweb.backends.models import Host
from dstackweb.cli import hosts
from dstackweb.cli.output import CliError, UsageError
from dstackweb.runs.models import Run
from tests.cli.conftest import Cli
from tests.factories import make_host, make_run, place_all, placed_job, start

HTTPS = "https://gpus.example.org"


@pytest.fixture
def admin(cli: Cli, ada: User) -> Cli:
    User.objects.filter(pk=ada.pk).update(is_superuser=True)
    return cli


def test_ls_shows_usage_and_state_of_each_host(cli: Cli, project: Project) -> None:
    make_host("box", gpus=2, labels={"region": "eu", "disk": "nvme"}, cgroups={"version": "v1", "code": ""})
    make_host("old", silent_s=9999, draining=True, error="disk full")
    rows = cli.ok("host", "list").splitlines()
    assert rows[0].split() == ["NAME", "STATE", "GPUS", "CPUS", "MEMORY", "JOBS", "LIMITS", "LABELS", "SEEN", "ERROR"]
    assert rows[1].split()[:9] == ["box", "online", "0/2", "0/8", "0/32", "GB", "0", "cgroups", "v1"]
    assert "offline, draining" in rows[2]
    assert rows[2].endswith("disk full")
    assert [host["name"] for host in json.loads(cli.ok("host", "list", "--json"))["items"]] == ["box", "old"]


def test_a_host_is_drained_labelled_and_removed(admin: Cli, project: Project) -> None:
    make_host("box", labels={"rack": "4"})
    assert admin.ok("host", "drain", "box") == "box: draining\n"
    assert admin.ok("host", "undrain", "box") == "box: online\n"
    assert admin.ok("host", "label", "box", "disk=nvme", "rack-") == "box: disk=nvme\n"
    assert admin.ok("host", "leave", "box") == "box gets no new jobs and is removed now.\n"
    assert Host.objects.filter(leaving=True, labels={"disk": "nvme"}).exists()
    assert admin("host", "label", "box", "disk").exit_code == 2


def test_a_held_back_host_is_shown_as_such_and_cleared(admin: Cli, project: Project) -> None:
    host = make_host("box")
    for _ in range(inventory.HOLD_BACK_AFTER):
        inventory.count_failed_start(host.pk, "No space left on device", timezone.now())
    listed = admin.ok("host", "list")
    assert "held back" in listed
    assert "No space left on device" in listed
    assert admin.ok("host", "clear", "box") == "box: online\n"


def test_a_machine_is_declared_gone_with_a_reason(admin: Cli, project: Project, ada: User) -> None:
    make_host("box")
    run = make_run(project, ada, "stuck")
    place_all()
    start(placed_job(run))
    refused = admin("host", "gone", "box", "--reason", "sold", "--yes")
    assert (refused.exit_code, "is online" in refused.stderr) == (1, True)
    Host.objects.update(silent_s=1e6)
    assert "Waits for box" in admin("stop", "stuck", "--yes").stderr
    assert admin.ok("host", "gone", "box", "--reason", "sold", "--yes") == "box: 1 job ended.\n"
    assert Run.objects.get(pk=run.pk).status == "terminated"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_an_invalid_host_name_is_refused_before_anything_is_sent(admin: Cli, name: str) -> None:
    for args in (("drain", name), ("leave", name), ("label", name, "disk=nvme")):
        refused = admin("host", *args)
        assert (refused.exit_code, f"invalid name {name!r}" in refused.stderr) == (2, True)
    assert admin("host", "label", "box", "--", "-").exit_code == 2


def test_other_users_are_refused_with_the_reason(cli: Cli, project: Project) -> None:
    make_host("box")
    refused = cli("host", "drain", "box")
    assert (refused.exit_code, "only deployment admins" in refused.stderr) == (1, True)


def test_an_invite_is_a_command_and_a_host_that_is_revoked_must_join_again(admin: Cli, project: Project) -> None:
    make_host("box", token_digest="d")
    assert "host join" in admin.ok("host", "invite")
    assert "box must join again" in admin.ok("host", "revoke", "box")
    assert Host.objects.get().token_digest == ""


class FakeServer:
    """Answers a join as the API does; `calls` are the bodies it got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answer: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self.answer = {"obstacles": [], **answer}
        real = httpx.Client
        monkeypatch.setattr(httpx, "Client", lambda **options: real(**options | {"transport": self.transport}))

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(json.loads(request.content))
        token = None if self.calls[-1].get("check") else "dwh_secret"
        return httpx.Response(200, json=self.answer | {"token": token})


def use_token(home: Path, url: str = HTTPS, *, insecure: bool = False) -> Path:
    return hosts.use_token(home, url, "dwj_x", name="far", labels={"disk": "nvme"}, insecure=insecure)


def test_the_hosts_token_is_stored_for_this_user_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = FakeServer(monkeypatch)
    monkeypatch.setenv("DSTACKWEB_SHARED_UID", "1")
    file = use_token(tmp_path / "home")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    stored = json.loads(file.read_text())
    assert (stored["token"], stored["name"], stored["url"], stored["shared_uid"]) == ("dwh_secret", "far", HTTPS, True)
    # With the same nonce the machine may repeat a call whose answer was lost.
    assert len({call["nonce"] for call in server.calls}) == 1
    ran: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: ran.append(call))
    hosts.start_host(tmp_path / "home", labels={"disk": "nvme"}, address="10.0.0.2")
    _program, argv, _env = ran[0]
    home = str(tmp_path / "home")
    options = ["--home", home, "--label=disk=nvme", "--address=10.0.0.2"]
    assert argv[1:] == ["-S", "-m", "dstackweb.runner", "host", *options]


def test_all_obstacles_are_listed_before_the_token_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = FakeServer(monkeypatch, obstacles=["a host called far is online"])
    with pytest.raises(CliError, match="The token is still valid") as caught:
        use_token(tmp_path)
    assert list(caught.value.notes) == ["a host called far is online"]
    assert [call.get("check") for call in server.calls] == [True]
    assert not (tmp_path / "host.json").exists()


def test_plain_http_to_another_machine_needs_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = FakeServer(monkeypatch)
    with pytest.raises(UsageError, match=r"is not encrypted\. Nothing was sent"):
        use_token(tmp_path, "http://10.0.0.1:8000")
    assert not server.calls
    use_token(tmp_path, "http://10.0.0.1:8000", insecure=True)
    assert [call["insecure"] for call in server.calls] == [True, True]


def test_a_machine_that_has_not_joined_gets_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this machine has not joined"):
        hosts.start_host(tmp_path, labels={}, address="")


def test_an_unwritable_home_is_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = FakeServer(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(CliError, match="Nothing was sent"):
        use_token(tmp_path / "file" / "home")
    assert not server.calls
