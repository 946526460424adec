"""Hosts over the API: what they have, who may change them, and how a machine joins with its token (R13, R25)."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import dstackweb
from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import create_token
from dstackweb.audit.models import AuditAction, AuditEntry, AuditKind
from dstackweb.backends.hosts import inventory, joining
from dstackweb.backends.models import Host, HostEvent, HostInvite
from dstackweb.gpus import intake
from dstackweb.lib.secrets import digest
from dstackweb.lib.times import to_ms
from dstackweb.runner.nvml import Snapshot
from tests.factories import make_host, make_run, make_user, place_all, placed_job, start
from tests.gpus.snapshots import sample

pytestmark = pytest.mark.django_db
Call = Callable[..., Any]
HOSTS = "/api/v1/hosts"


def caller(token: str) -> Call:
    def call(method: str, path: str = "", body: object = None) -> Any:
        return Client().generic(
            method,
            HOSTS + path,
            b"" if body is None else json.dumps(body),
            "application/json",
            headers={"Authorization": f"Bearer {token}"},
        )

    return call


def of(user: User) -> Call:
    return caller(create_token(user, "test")[1])


@pytest.fixture
def root(project: Project) -> Call:
    return of(make_user("root", is_superuser=True))


def test_a_host_shows_whether_its_jobs_are_limited_to_their_resources(project: Project, member: User) -> None:
    make_host("box-1", cgroups={"version": "v1", "memory": True, "cpu": False, "code": "no_controllers", "error": ""})
    make_host("box-2")
    limited, unknown = (host["cgroups"] for host in of(member)("GET").json()["items"])
    assert (limited["version"], limited["memory"], limited["cpu"]) == ("v1", True, False)
    assert (limited["code"], unknown["version"], unknown["code"]) == ("no_controllers", "", "")


def test_a_host_shows_its_capacity_and_how_much_is_used(project: Project, member: User) -> None:
    make_host("box-1", cpus=8, gpus=3, labels={"disk": "nvme"})
    make_run(project, member, resources={"gpu": 2, "cpu": 4})
    place_all()
    (found,) = of(member)("GET").json()["items"]
    assert (found["gpus_total"], found["gpus_used"], found["cpus"], found["cpus_used"]) == (3, 2, 8, 4)
    assert (found["labels"], found["jobs"], found["leaving"], found["reserved"]) == ({"disk": "nvme"}, 1, False, None)


def test_labels_are_merged_and_null_removes_one(root: Call) -> None:
    make_host("box-1", labels={"a": "1", "b": "2"})
    answer = root("PATCH", "/box-1", {"labels": {"b": None, "c": "3"}})
    assert answer.json()["labels"] == {"a": "1", "c": "3"}
    event = HostEvent.objects.get()
    assert (event.kind, event.data, event.actor) == (
        "labelled",
        {"set": {"c": "3"}, "removed": ["b"]},
        User.objects.get(),
    )


@pytest.mark.parametrize("labels", [{"a b": "c"}, {"a": ""}, {"a": 1}, {f"n{i}": "x" for i in range(51)}])
def test_an_invalid_label_is_refused(root: Call, labels: dict[str, object]) -> None:
    make_host("box-1")
    assert root("PATCH", "/box-1", {"labels": labels}).status_code == 422
    assert Host.objects.get().labels == {}


def test_draining_the_same_twice_is_one_event(root: Call) -> None:
    make_host("box-1")
    for _ in range(2):
        assert root("PATCH", "/box-1", {"draining": True}).json()["draining"] is True
    assert HostEvent.objects.count() == 1


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("PATCH", "/box-1", {"draining": True}), ("POST", "/box-1/leave", None), ("POST", "/invites", None),
     ("GET", "/invites", None), ("DELETE", "/invites/1", None)],
)  # fmt: skip
def test_only_admins_of_the_deployment_change_hosts(member: User, method: str, path: str, body: object) -> None:
    make_host("box-1")
    assert of(member)(method, path, body).status_code == 403


def test_a_host_that_left_is_in_no_list(root: Call) -> None:
    make_host("box-1", draining=True, leaving=True, left_at=timezone.now())
    assert root("GET").json()["items"] == []
    assert root("PATCH", "/box-1", {"draining": False}).status_code == 404


@pytest.fixture
def invite(root: Call) -> tuple[HostInvite, str]:
    """An invite and its token."""
    token = "dwj_of-the-test"
    row = HostInvite.objects.create(
        digest=joining.digest(token),
        created_by=User.objects.get(is_superuser=True),
        expires_at=timezone.now() + dt.timedelta(hours=1),
    )
    return row, token


def machine(**changes: object) -> dict[str, object]:
    return {"name": "far", "url": "http://127.0.0.1:8000", "version": dstackweb.__version__, **changes}


def test_a_check_reports_all_obstacles_and_leaves_the_token_unused(invite: tuple[HostInvite, str]) -> None:
    make_host("far")
    Host.objects.update(token_digest="d")
    answer = caller(invite[1])("POST", "/join", machine(version="0.0.1", check=True)).json()
    shown = "\n".join(answer["obstacles"])
    assert "the machine has dstackweb 0.0.1 and the server" in shown
    assert "a host called far is online" in shown
    assert answer["token"] is None
    assert HostInvite.objects.filter(used_at=None).exists()
    # One whose token was revoked may join again at once; the server's own machine never.
    Host.objects.update(token_digest="")
    assert caller(invite[1])("POST", "/join", machine(check=True)).json()["obstacles"] == []
    Host.objects.update(cluster="dstackweb-far")
    (own,) = caller(invite[1])("POST", "/join", machine(check=True)).json()["obstacles"]
    assert "far is the server's own machine" in own


def test_obstacles_refuse_the_join_and_leave_the_token_unused(invite: tuple[HostInvite, str]) -> None:
    answer = caller(invite[1])("POST", "/join", machine(version="0.0.1"))
    assert answer.status_code == 409
    assert answer.json()["obstacles"]
    assert HostInvite.objects.filter(used_at=None).exists()


@pytest.mark.parametrize("name", ["two words", "", "..", "-", "a/b", "n" * 101, "a\n", "\0"])
def test_an_invalid_host_name_is_refused_with_a_message(invite: tuple[HostInvite, str], name: str) -> None:
    for check in (True, False):
        refused = caller(invite[1])("POST", "/join", machine(name=name, check=check))
        assert (refused.status_code, "is not a valid host name" in refused.json()["detail"]) == (422, True)
    assert HostInvite.objects.filter(used_at=None).exists()


@pytest.mark.parametrize("bad", [{"name": "two words"}, {"labels": {"a b": "c"}}, {"extra": 1}])
def test_an_unsuitable_machine_is_refused(invite: tuple[HostInvite, str], bad: dict[str, object]) -> None:
    assert caller(invite[1])("POST", "/join", machine(**bad, check=True) | bad).status_code == 422


def test_plain_http_is_refused_unless_it_is_allowed(invite: tuple[HostInvite, str]) -> None:
    url = "http://10.0.0.1:8000"
    plain = caller(invite[1])("POST", "/join", machine(url=url, check=True)).json()["obstacles"]
    wanted = caller(invite[1])("POST", "/join", machine(url=url, check=True, insecure=True)).json()["obstacles"]
    assert any("http://10.0.0.1:8000 is not encrypted" in text for text in plain)
    assert not any("not encrypted" in text for text in wanted)


def test_a_join_token_works_once_and_returns_a_token_for_this_host(
    invite: tuple[HostInvite, str], settings: Any
) -> None:
    answer = caller(invite[1])("POST", "/join", machine(labels={"disk": "nvme"}, nonce="n1"))
    joined = answer.json()
    assert set(joined) == {"name", "expires_at", "obstacles", "token"}
    assert settings.SECRET_KEY not in answer.content.decode()
    host = Host.objects.get()
    assert (host.name, host.labels, host.token_digest) == ("far", {"disk": "nvme"}, digest(joined["token"]))
    for again in (machine(name="other", nonce="n1"), machine(nonce="n2"), machine(), machine(check=True)):
        refused = caller(invite[1])("POST", "/join", again)
        assert (refused.status_code, "was used already by far" in refused.json()["detail"]) == (403, True)
    repeated = caller(invite[1])("POST", "/join", machine(nonce="n1")).json()["token"]
    assert Host.objects.get().token_digest == digest(repeated)


def test_a_machine_that_joins_under_a_hosts_name_is_recorded_with_who_let_it_in(
    invite: tuple[HostInvite, str],
) -> None:
    make_host("far", silent_s=1e6)
    for _again in range(2):
        assert caller(invite[1])("POST", "/join", machine(nonce="n1")).status_code == 200
    [event] = HostEvent.objects.all()
    assert (event.kind, event.actor) == ("admitted", invite[0].created_by)
    entry = AuditEntry.objects.filter(kind=AuditKind.HOST, action=AuditAction.CHANGED).get()
    assert (entry.name, entry.actor_name) == ("far", invite[0].created_by.username)


def test_only_admins_revoke_a_hosts_token_and_it_is_recorded_as_one_event(root: Call, member: User) -> None:
    make_host("box-1", token_digest="d")
    make_host("own", cluster="dstackweb-own")
    assert of(member)("POST", "/box-1/revoke").status_code == 403
    assert root("POST", "/own/revoke").status_code == 409
    for _ in range(2):
        assert root("POST", "/box-1/revoke").status_code == 200
    assert Host.objects.get(name="box-1").token_digest == ""
    assert [event.kind for event in HostEvent.objects.all()] == ["revoked"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"used_at": timezone.now(), "host_name": "box"}, "used already by box"),
        ({"expires_at": timezone.now() - dt.timedelta(seconds=1)}, "has expired"),
    ],
)
def test_a_token_that_is_used_or_old_is_refused(
    invite: tuple[HostInvite, str], changes: dict[str, Any], why: str
) -> None:
    HostInvite.objects.update(**changes)
    answer = caller(invite[1])("POST", "/join", machine(check=True))
    assert (answer.status_code, why in answer.json()["detail"]) == (403, True)


def test_a_join_token_is_void_once_its_creator_is_no_longer_admin(invite: tuple[HostInvite, str]) -> None:
    User.objects.update(is_superuser=False)
    assert caller(invite[1])("POST", "/join", machine(check=True)).status_code == 403


def test_api_tokens_and_join_tokens_are_not_interchangeable(root: Call, invite: tuple[HostInvite, str]) -> None:
    assert root("POST", "/join", machine(check=True)).status_code == 403
    assert caller(invite[1])("GET").status_code == 401


def test_an_open_token_is_listed_and_withdrawn_without_being_shown(root: Call, invite: tuple[HostInvite, str]) -> None:
    (item,) = root("GET", "/invites").json()["items"]
    assert (item["created_by"], "token" in item) == ("root", False)
    assert root("DELETE", f"/invites/{item['id']}").status_code == 204
    assert caller(invite[1])("POST", "/join", machine(check=True)).status_code == 403


def test_a_gpu_shows_its_newest_sample(project: Project, member: User) -> None:
    host = make_host("box-1", gpus=3)
    run = make_run(project, member, resources={"gpu": 1})
    place_all()
    job = start(placed_job(run))
    (held,) = job.gpus
    now_ms = to_ms(timezone.now())
    seen = [sample(f"GPU-box-1-{n}", 10 * n, throttle=1) for n in range(2)]
    intake.add_snapshot(host, Snapshot(tuple(seen), took_ms=4.5), now_ms - 10_000)
    busy = [sample(one.uuid, 90, throttle=0x61) if one.uuid == held else one for one in seen]
    intake.add_snapshot(host, Snapshot(tuple(busy), took_ms=5.5, error="GPU 2: fallen off the bus"), now_ms)
    (found,) = of(member)("GET").json()["items"]
    samples = {gpu["uuid"]: gpu["sample"] for gpu in found["gpus"]}
    assert samples[held]["utilization"] == 90
    assert samples[held]["held_back"] == ["heat"]
    assert samples["GPU-box-1-2"] is None
    assert (found["sampling"]["took_ms"], found["sampling"]["error"]) == (5.5, "GPU 2: fallen off the bus")
    assert found["sampling"]["library"]


def test_how_many_hosts_there_are_costs_no_further_queries(project: Project, member: User) -> None:
    make_host("box-1", gpus=2)
    call = of(member)
    with CaptureQueriesContext(connection) as one:
        call("GET")
    for number in range(2, 6):
        intake.add_snapshot(
            make_host(f"box-{number}", gpus=4), Snapshot((sample(f"GPU-box-{number}-1", 3),)), 1_800_000_000_000
        )
    with CaptureQueriesContext(connection) as many:
        assert len(call("GET").json()["items"]) == 5
    assert len(many) <= len(one)


def test_a_machine_is_declared_gone_only_while_it_is_silent_and_with_a_reason(
    root: Call, project: Project, member: User
) -> None:
    make_host("box-1", gpus=1)
    run = make_run(project, member, resources={"gpu": 1})
    place_all()
    start(placed_job(run))
    assert root("POST", "/box-1/gone", {"reason": "sold"}).status_code == 409
    Host.objects.update(silent_s=1e6)
    assert root("POST", "/box-1/gone", {"reason": " "}).status_code == 422
    assert of(member)("POST", "/box-1/gone", {"reason": "sold"}).status_code == 403
    assert root("POST", "/box-1/gone", {"reason": "sold"}).json() == {"ended": 1}
    assert root("POST", "/box-1/gone", {"reason": "sold"}).json() == {"ended": 0}


def test_a_held_back_host_shows_since_when_and_why_until_it_is_cleared(root: Call, member: User) -> None:
    host = make_host("box-1")
    for _ in range(inventory.HOLD_BACK_AFTER):
        inventory.count_failed_start(host.pk, "No space left on device", timezone.now())
    (found,) = root("GET").json()["items"]
    assert (found["start_failures"], found["start_error"]) == (3, "No space left on device")
    assert found["held_back_at"]
    assert of(member)("POST", "/box-1/clear").status_code == 403
    assert root("POST", "/box-1/clear").json()["held_back_at"] is None
