"""Every change of settings, members and accounts, and every sign-in, has an entry with who, when and from where."""

from __future__ import annotations

import ast
import csv
import datetime as dt
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import connection, transaction
from django.http import HttpRequest
from django.test import Client, RequestFactory
from django.utils import timezone, translation

from dstackweb.accounts import services
from dstackweb.accounts.models import Project, User
from dstackweb.audit import log, recorder
from dstackweb.audit.log import AuditFilter
from dstackweb.audit.models import AuditAction, AuditEntry, AuditKind
from dstackweb.backends import services as backends
from dstackweb.backends.hosts import inventory
from dstackweb.gpus.exemptions import set_observe_only
from dstackweb.lib import exports, sql
from dstackweb.lib.errors import NotFound
from dstackweb.notifications import channels
from dstackweb.notifications.models import ChannelKind
from dstackweb.notifications.services import RuleScope, bell_of, set_rules
from dstackweb.profiles.models import Profile
from dstackweb.profiles.services import make_default
from dstackweb.runs import removal
from dstackweb.runs.notification_codes import NotificationEvent
from dstackweb.runs.queue import queues
from dstackweb.runs.services import find_queue, stop
from dstackweb.scheduler.processes import retention
from dstackweb.wording import audit as words
from tests.factories import join, make_host, make_project, make_run, make_user
from tests.forms import submit
from tests.support import REPO

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]


@pytest.fixture
def request_(project: Project) -> Iterator[HttpRequest]:
    """A request of root from 192.0.2.7, which this thread answers."""
    request = RequestFactory().post("/", REMOTE_ADDR="192.0.2.7")
    request.user = make_user("root", is_superuser=True)
    AuditEntry.objects.all().delete()
    with recorder.answering(request):
        yield request


@pytest.fixture
def root(request_: HttpRequest) -> User:
    assert isinstance(request_.user, User)
    return request_.user


def written() -> list[tuple[str, str, str, dict[str, Any]]]:
    """All entries, the oldest first."""
    found = AuditEntry.objects.order_by("id")
    assert {(entry.actor_name, entry.address) for entry in found} <= {("root", "192.0.2.7")}
    return [(entry.kind, entry.name, entry.action, entry.changes) for entry in found]


def test_a_member_is_added_promoted_and_removed(project: Project, root: User) -> None:
    eve = make_user("eve")
    AuditEntry.objects.all().delete()
    join(project, eve)
    services.set_role(project, eve, "manager")
    services.remove_member(project, eve)
    assert written() == [
        ("member", "eve", "created", {"role": [None, "member"]}),
        ("member", "eve", "changed", {"role": ["member", "manager"]}),
        ("member", "eve", "deleted", {}),
    ]
    assert set(AuditEntry.objects.values_list("project_name", "project_id")) == {("main", project.pk)}


def test_no_secret_value_is_ever_written(project: Project, root: User) -> None:
    services.set_secret(project, "HF_TOKEN", "hf_abcdefgh", by=root)
    services.set_secret(project, "HF_TOKEN", "hf_ijklmnop", by=root)
    root.set_password("another correct horse")
    root.save()
    _row, token = services.create_token(root, "laptop")
    link = services.make_login_link(root)
    key = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": "s" * 40}
    config = {"regions": ["eu-west-1"], "credentials": {"type": "access_key", **key}}
    backends.put("cloud", "aws", config, enabled=True)
    text = json.dumps([*AuditEntry.objects.values_list("changes", "name")])
    for secret in ("hf_", "horse", token, link, "s" * 40, root.password, "pbkdf2", 'ciphertext": "'):
        assert secret not in text, secret
    assert [entry[:3] for entry in written()] == [
        ("secret", "HF_TOKEN", "created"), ("secret", "HF_TOKEN", "changed"), ("user", "root", "changed"),
        ("token", "root: laptop", "created"),
        ("sign_in_link", AuditEntry.objects.get(kind="sign_in_link").name, "created"),
        ("backend", "cloud", "created"),
    ]  # fmt: skip
    assert AuditEntry.objects.get(kind="user").changes == {"password": None}


def test_channels_and_their_rules_are_recorded_without_their_addresses(project: Project, root: User) -> None:
    channel = channels.create(project, ChannelKind.WEBHOOK, "hooks", "https://hooks.example.org/secret-part")
    first = channels.replace_key(channel)
    set_rules(channel, {NotificationEvent.RUN_ENDED: RuleScope(own=False, project_id=project.pk)})
    set_rules(channel, {NotificationEvent.RUN_ENDED: RuleScope(own=False, project_id=project.pk)})
    channels.turn(channel, False)
    channel.delete()
    assert written() == [
        ("channel", "hooks", "created", {"kind": [None, "webhook"], "enabled": [None, True], "url": None, "key": None}),
        ("channel", "hooks", "changed", {"key": None}),
        ("channel", "hooks", "changed", {"rules": [["run_failed (main)"], ["run_ended (main)"]]}),
        ("channel", "hooks", "changed", {"enabled": [True, False]}),
        ("channel", "hooks", "deleted", {}),
    ]
    assert set(AuditEntry.objects.values_list("project_id", flat=True)) == {project.pk}
    text = json.dumps([*AuditEntry.objects.values_list("changes", "name")])
    assert "secret-part" not in text
    assert first not in text


def test_what_a_user_sees_in_the_app_is_no_channel_of_the_audit_log(project: Project, root: User) -> None:
    eve = make_user("eve")
    set_rules(bell_of(eve), {})
    eve.delete()
    assert not AuditEntry.objects.filter(kind="channel").exists()


def test_what_does_not_change_writes_nothing(project: Project, root: User) -> None:
    queues.change_queue(find_queue(project, "default"), root, "manager", paused=False)
    project.save()
    root.last_login = timezone.now()
    root.save(update_fields=["last_login"])
    assert written() == []


def test_settings_of_queues_profiles_policies_and_projects(project: Project, root: User) -> None:
    queues.change_queue(find_queue(project, "default"), root, "manager", paused=True, max_gpus=4)
    one = Profile.objects.create(project=project, name="one", is_default=True, settings={"max_duration": "1h"})
    two = Profile.objects.create(project=project, name="two")
    AuditEntry.objects.filter(kind="profile").delete()
    make_default(two)
    set_observe_only(project, "manager", True)
    project.weight = 3
    project.save()
    assert written() == [
        ("queue", "default", "changed", {"paused": [False, True], "max_gpus": [None, 4]}),
        ("profile", "one", "changed", {"is_default": [True, False]}),
        ("profile", "two", "changed", {"is_default": [False, True]}),
        (
            "policies", "main", "created",
            {"observe_only": [None, True], "max_exemptions": [None, 3], "exemption_minutes": [None, 30]},
        ),
        ("project", "main", "changed", {"weight": [1, 3]}),
    ]  # fmt: skip
    one.refresh_from_db()
    assert not one.is_default


def test_what_people_do_to_hosts(root: User) -> None:
    host = make_host("gpu-1")
    AuditEntry.objects.all().delete()
    inventory.set_draining(host, root, True)
    assert written() == [("host", "gpu-1", "changed", {"event": [None, "drained"]})]


def test_an_undone_change_leaves_no_entry(project: Project, root: User) -> None:
    with transaction.atomic():
        project.weight = 9
        project.save()
        assert written()
        transaction.set_rollback(True)
    assert written() == []


def test_sign_ins_fail_and_succeed_with_their_address_and_way(project: Project, client: Client) -> None:
    make_user("ada", password="correct horse battery")
    AuditEntry.objects.all().delete()
    for password in ("wrong", "correct horse battery"):
        submit(client, "/login/", {"username": "ada", "password": password}, REMOTE_ADDR="198.51.100.9")
    submit(client, "/account/", to="/logout/", REMOTE_ADDR="198.51.100.9")
    link = services.make_login_link(User.objects.get(username="ada"))
    submit(client, f"/login/{link}/", REMOTE_ADDR="198.51.100.9")
    found = list(AuditEntry.objects.exclude(kind="sign_in_link").order_by("id"))
    assert [(entry.action, entry.actor_name, entry.name, entry.changes) for entry in found] == [
        ("sign_in_failed", "no one signed in", "ada", {}),
        ("signed_in", "ada", "ada", {"with": [None, "password"]}),
        ("signed_out", "ada", "ada", {}),
        ("signed_in", "ada", "ada", {"with": [None, "sign-in link"]}),
    ]
    assert {entry.address for entry in found} == {"198.51.100.9"}


def test_failed_sign_ins_cannot_fill_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FAILURES_AT_ONCE", 3.0)
    monkeypatch.setattr(recorder.time, "time", lambda: 1.8e9)
    for number in range(10):
        recorder._sign_in_failed(None, {"username": f"guess-{number}"})
    assert AuditEntry.objects.filter(action="sign_in_failed").count() <= 4


def test_a_change_over_the_api_names_the_token(project: Project, client: Client) -> None:
    boss = join(project, make_user("boss"), "admin")
    _row, token = services.create_token(boss, "ci")
    answer = client.put(
        "/api/v1/projects/main/queues/default", {"paused": True}, "application/json",
        headers={"Authorization": f"Bearer {token}"},
    )  # fmt: skip
    if answer.status_code == 405:
        answer = client.patch(
            "/api/v1/projects/main/queues/default", {"paused": True}, "application/json",
            headers={"Authorization": f"Bearer {token}"},
        )  # fmt: skip
    assert answer.status_code == 200, answer.content
    entry = AuditEntry.objects.filter(kind="queue").latest("id")
    assert (entry.actor_name, entry.via, entry.address) == ("boss", "ci", "127.0.0.1")


def test_outside_requests_it_is_the_server_or_the_command_line(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, shell = (["/x/manage.py", "qcluster"], "the server"), (["/x/bin/dstackweb-server", "shell"], "command line")
    for argv, actor in (server, shell, (["/x/manage.py", "shell"], "command line")):
        monkeypatch.setattr(recorder.sys, "argv", argv)
        project.weight += 1
        project.save()
        assert actor in AuditEntry.objects.latest("id").actor_name


def test_entries_can_neither_be_changed_nor_saved_again(project: Project) -> None:
    entry = AuditEntry.objects.latest("id")
    entry.actor_name = "somebody else"
    for change in (entry.save, lambda: AuditEntry.objects.update(actor_name="somebody else")):
        with pytest.raises(TypeError):
            change()


def test_old_entries_are_pruned(project: Project) -> None:
    old = AuditEntry.objects.create(
        kind="user", action="changed", name="ada", actor_name="x",
        at=timezone.now() - dt.timedelta(days=settings.DSTACKWEB_AUDIT_DAYS + 1),
    )  # fmt: skip
    kept = AuditEntry.objects.exclude(pk=old.pk).count()
    retention.prune(budget_s=None)
    assert AuditEntry.objects.count() == kept
    assert not AuditEntry.objects.filter(pk=old.pk).exists()


def entries(number: int, **fields: Any) -> None:
    values = {"kind": "queue", "action": "changed", "name": "default", "actor_name": "ada", **fields}
    for one in range(number):
        AuditEntry.objects.create(**{**values, "changes": {"paused": [one, one + 1]}})


def test_pages_follow_one_another_without_gaps(project: Project) -> None:
    AuditEntry.objects.all().delete()
    entries(7)
    seen: list[int] = []
    before = None
    while True:
        rows, before = log.page(AuditFilter(), 3, before)
        seen += [row.pk for row in rows]
        if before is None:
            break
    assert seen == sorted(AuditEntry.objects.values_list("pk", flat=True), reverse=True)


def test_admins_of_a_project_see_its_entries_alone_and_others_none(project: Project, client: Client) -> None:
    other = make_project("other")
    entries(1, name="of-main", project_id=project.pk, project_name="main")
    entries(1, name="of-other", project_id=other.pk, project_name="other")
    for role, page, api in (("admin", 200, 200), ("manager", 403, 403), (None, 404, 404)):
        user = make_user()
        if role is not None:
            join(project, user, role)
        client.force_login(user)
        _row, token = services.create_token(user, "ci")
        headers = {"Authorization": f"Bearer {token}"}
        for form in ("", "audit.csv", "audit.json"):
            answer = client.get(f"/p/main/audit/{form}?all=yes")
            assert answer.status_code == page
            if page == 200:
                text = answer.getvalue().decode()
                assert ("of-main" in text, "of-other" in text) == (True, False), form
        assert client.get("/api/v1/projects/main/audit", headers=headers).status_code == api
        assert client.get("/api/v1/audit", headers=headers).status_code == 403


@pytest.mark.django_db
@pytest.mark.both_sides
def test_an_export_that_is_not_read_to_its_end_leaves_nothing_open_in_the_database(
    member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "CHUNK", 2)
    for number in range(5):
        services.create_token(member, f"token-{number}")
    found = log.every(AuditFilter(kind=AuditKind.TOKEN))
    newest = next(found)["name"]
    if connection.vendor == "postgresql":
        assert sql.rows("SELECT name FROM pg_cursors", []) == []
    names = [newest, *(entry["name"] for entry in found)]
    assert [name.split()[1] for name in names] == [f"token-{number}" for number in (4, 3, 2, 1, 0)]


def test_no_field_of_the_csv_is_a_formula() -> None:
    for name in ("=1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1", "  =1", "＝1", "＠x"):
        entries(1, name=name, project_id=98)
    rows = csv.reader(io.StringIO("".join(exports.as_csv(log.COLUMNS, log.every(AuditFilter())))))
    assert [row[6][0] for row in rows][1:] == ["'"] * 10


def test_deployment_admins_search_all_and_export_what_they_see(project: Project, client: Client) -> None:
    client.force_login(make_user("root", is_superuser=True))
    entries(2, name="=cmd()", project_id=99, project_name="other", address="192.0.2.55")
    found = client.get("/p/main/audit/?all=yes&q=192.0.2.55&kind=queue").content.decode()
    assert "=cmd()" in found
    assert "paused: 1 → 2" in found
    rows = list(
        csv.DictReader(io.StringIO(client.get("/p/main/audit/audit.csv?all=yes&q=192.0.2.55").getvalue().decode()))
    )
    assert [row["name"] for row in rows] == ["'=cmd()", "'=cmd()"]
    parsed = json.loads(client.get("/p/main/audit/audit.json?all=yes&q=192.0.2.55").getvalue())
    assert [(row["name"], row["changes"]) for row in parsed] == [("=cmd()", {"paused": [n, n + 1]}) for n in (1, 0)]
    assert client.get("/p/main/audit/audit.xml").status_code == 404
    for text in ("no-such", "x" * 60_000):
        assert "No entries match" in client.get(f"/p/main/audit/?q={text}").content.decode()


def test_whose_run_somebody_deleted_is_remembered_with_its_id(project: Project, root: User) -> None:
    """All that was known of it, and of what people did to it, is deleted with it."""
    run = stop(make_run(project, join(project, make_user("eve"))), root, "admin")
    AuditEntry.objects.all().delete()
    removal.delete(run, root, "admin")
    assert written() == [("run", run.name, "deleted", {"user": [None, "eve"], "id": [None, str(run.uid)]})]
    assert AuditEntry.objects.get().project_id == project.pk
    with pytest.raises(NotFound):
        removal.delete(run, root, "admin")
    assert AuditEntry.objects.count() == 1


def test_every_code_has_words() -> None:
    assert all(words.KIND(kind) for kind in AuditKind)
    assert all(words.ACTION(action) for action in AuditAction)
    entry = AuditEntry(changes={"a_b": [None, ""], "c": [True, False], "password": None, "d": [1, {"x": "y" * 99}]})
    assert words.changes(entry)[:3] == ["a b: none", "c: yes → no", "password: not shown"]
    assert len(words.changes(entry)[3]) < 80
    with translation.override("zh-hans"):
        entry = AuditEntry(kind="queue", changes={"reclaim": ["never", "any"], "paused": [False, True]})
        assert words.changes(entry) == ["收回：等待其空闲 → 从任意优先级的可抢占运行任务收回", "已暂停：否 → 是"]
        entry = AuditEntry(kind="channel", changes={"rules": [[], ["run_ended (own)", "run_failed"]], "url": None})
        assert words.changes(entry) == [
            "规则：无 → 运行任务结束，无论结果如何（自己的）；运行任务失败，或被服务器停止",
            "URL：不显示",
        ]
        entry = AuditEntry(kind="user", changes={"with": [None, "password, passkey"], "is_staff": [False, True]})
        assert words.changes(entry) == ["登录方式：密码、通行密钥", "可打开管理后台：否 → 是"]


ALLOWED = {
    ("accounts/services.py", "used_at"), ("backends/services.py", "secret"),  # forgets secrets of deleted backends
    ("backends/hosts/joining.py", "labels"), ("backends/hosts/inventory.py", "labels"),  # of the machine itself
    ("backends/hosts/inventory.py", "draining"),  # by an event of the host
}  # fmt: skip


@pytest.mark.nightly
def test_no_setting_is_changed_past_the_signals() -> None:
    """`update()` of a row set sends none: no field that is recorded is written so."""
    fields = {name for watched in recorder.WATCHED.values() for name in (*watched.fields, *watched.secret)}
    of_rows_that_are_no_settings = {"name", "user", "role", "kind", "settings", "expires_at", "paused", "key"}
    fields -= of_rows_that_are_no_settings
    found = set()
    for path in sorted((REPO / "dstackweb").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
                place = str(path.relative_to(REPO / "dstackweb"))
                found |= {(place, key.arg) for key in node.keywords if key.arg in fields}
    assert found <= ALLOWED


def test_nobody_is_signed_in_to_an_anonymous_request(project: Project) -> None:
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    with recorder.answering(request):
        project.weight += 1
        project.save()
    entry = AuditEntry.objects.latest("id")
    assert (entry.actor_id, entry.actor_name, entry.address) == (None, "no one signed in", "127.0.0.1")


def test_docs_name_the_page() -> None:
    assert "## Audit log" in Path(REPO / "docs" / "security.md").read_text()
