"""New passwords by a link: by mail where a mailer is set, or made by hand by who may."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.core import mail
from django.test import Client

from dstackweb.accounts import attempts, services, tokens
from dstackweb.accounts.access import may_set_passwords
from dstackweb.accounts.models import Project, User
from dstackweb.audit.models import AuditEntry, AuditKind
from dstackweb.notifications import password_mail
from dstackweb.scheduler.processes import tasks
from tests.factories import join, make_project, make_user
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db
PASSWORD, NEW = "correct horse battery", "another long password"


@pytest.fixture
def project() -> Project:
    return make_project("vision")


@pytest.fixture
def ada(project: Project) -> User:
    return join(project, make_user("ada", password=PASSWORD, email="ada@example.org"), "member")


@pytest.fixture
def mailer(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up, with a worker that does its task at once."""
    settings.DSTACKWEB_EMAIL_URL = "smtp://mail.example.org?from=gpus@example.org"
    monkeypatch.setattr(tasks, "enqueue", lambda task, *args, cluster: task(*args))


def set_password(client: Client, address: str) -> Any:
    opened = client.get(address)
    return submit(client, opened["Location"], {"new_password1": NEW, "new_password2": NEW}, follow=True)


def ask_for_a_mail(client: Client, to: str) -> Any:
    return submit(client, "/password/forgot/", {"email": to})


def test_without_a_mailer_nothing_is_offered(client: Client, ada: User, settings: Any) -> None:
    assert "/password/forgot/" not in client.get("/login/").content.decode()
    assert client.get("/password/forgot/").status_code == 404
    settings.DSTACKWEB_EMAIL_URL = "smtp://mail.example.org?from=gpus@example.org"
    form = open_form(client, "/password/forgot/")
    settings.DSTACKWEB_EMAIL_URL = ""
    assert form.send({"email": ada.email}).status_code == 404


def test_a_mail_has_a_link_that_sets_a_password_once_and_signs_nobody_in(
    client: Client, ada: User, mailer: None
) -> None:
    assert "/password/forgot/" in client.get("/login/").content.decode()
    ask_for_a_mail(client, "ADA@example.org")
    (sent,) = mail.outbox
    assert sent.to == ["ada@example.org"]
    address = re.search(r"http://testserver(/password/\S+)", sent.body)
    assert address
    assert "Password changed" in set_password(client, address[1]).content.decode()
    ada.refresh_from_db()
    assert ada.check_password(NEW)
    assert "_auth_user_id" not in client.session
    assert "does not work" in Client().get(address[1]).content.decode()


def test_the_page_says_the_same_of_an_address_that_nobody_has(client: Client, ada: User, mailer: None) -> None:
    answers = [ask_for_a_mail(client, to).content for to in (ada.email, "nobody@example.org")]
    pages = [re.sub(rb'name="csrfmiddlewaretoken" value="\w+"|data-now="\d+"', b"", page) for page in answers]
    assert pages[0] == pages[1]
    assert len(mail.outbox) == 1


def test_one_person_gets_few_mails_and_who_is_inactive_none(
    client: Client, ada: User, mailer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MOST_MAILS", 2)
    make_user("gone", email="gone@example.org", password=PASSWORD, is_active=False)
    make_user("elsewhere", email="elsewhere@example.org")  # who has no password: they sign in elsewhere
    for to in (ada.email, ada.email, ada.email, "gone@example.org", "elsewhere@example.org"):
        ask_for_a_mail(client, to)
    assert len(mail.outbox) == 2


def test_a_new_password_ends_sessions_and_leaves_the_second_step(client: Client, ada: User) -> None:
    other = Client()
    other.force_login(ada)
    set_password(client, password_mail.path(ada))
    assert other.get("/account/tokens/").status_code == 302


def test_an_old_link_does_not_work(client: Client, ada: User, settings: Any) -> None:
    address = password_mail.path(ada)
    settings.PASSWORD_RESET_TIMEOUT = -1
    assert "does not work" in client.get(address).content.decode()


def test_a_manager_makes_a_link_by_hand_which_is_recorded_and_shown_once(ada: User, project: Project) -> None:
    mia = join(project, make_user("mia"), "manager")
    client = Client()
    client.force_login(mia)
    made = submit(client, "/p/vision/members/", to=f"/{ada.pk}/password-link/")
    address = re.search(r'value="http://testserver(/password/[^"]+)"', made.content.decode())
    assert address
    assert "no-store" in made["Cache-Control"]
    set_password(Client(), address[1])
    ada.refresh_from_db()
    assert ada.check_password(NEW)
    entry = AuditEntry.objects.get(kind=AuditKind.PASSWORD_LINK)
    assert (entry.actor_name, entry.name, entry.project_name) == ("mia", "ada", "vision")
    assert address[1].split("/")[3] not in str(entry.changes)


def test_nobody_makes_a_link_for_a_person_with_more_rights_anywhere(project: Project) -> None:
    """No page offers it."""
    mia, ned = join(project, make_user("mia"), "manager"), join(project, make_user("ned"), "admin")
    bob, max_ = join(project, make_user("bob")), join(project, make_user("max"), "manager")
    root = join(project, make_user("root", is_superuser=True))
    staff, gone = join(project, make_user("staff", is_staff=True)), join(project, make_user("gone", is_active=False))
    eve = join(project, make_user("eve"))
    join(make_project("speech"), eve, "viewer")
    everybody = [mia, ned, bob, max_, root, staff, gone, eve]

    def names(by: User) -> set[str]:
        return {user.username for user in everybody if user.pk in may_set_passwords(by, everybody)}

    assert names(mia) == {"bob"}
    assert names(ned) == {"mia", "ned", "bob", "max"}
    assert names(bob) == set()
    assert names(root) == {user.username for user in everybody} - {"gone"}
    client = Client()
    client.force_login(mia)
    for user in (ned, max_, root, staff, gone, eve):
        assert client.post(f"/p/vision/members/{user.pk}/password-link/").status_code == 403
    assert not AuditEntry.objects.filter(kind=AuditKind.PASSWORD_LINK).exists()


def test_a_token_of_few_rights_makes_its_owner_no_link(project: Project, ada: User) -> None:
    root = make_user("root", is_superuser=True)
    _row, token = services.create_token(root, "ci", scope="read")
    limited = tokens.authenticate_token(token)
    assert limited
    assert may_set_passwords(limited, [ada]) == set()
