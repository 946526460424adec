"""Two-step sign-in: an app's codes, recovery codes, what needs a confirmation, and admins who need it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import TOTP, format_hotp_value, generate_totp_secret, hotp_value
from django.core.cache import caches
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext, override_settings

from dstackweb.accounts import attempts, services
from dstackweb.accounts.models import User
from dstackweb.audit.models import AuditAction, AuditEntry, AuditKind
from tests.factories import make_user
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"
SECRET = generate_totp_secret()


@pytest.fixture(autouse=True)
def no_memory_of_codes() -> Iterator[None]:
    """A code works once, which the cache remembers."""
    caches["default"].clear()
    yield
    caches["default"].clear()


@pytest.fixture
def ada() -> User:
    return make_user("ada", password=PASSWORD)


@pytest.fixture
def with_app(ada: User) -> User:
    TOTP.activate(ada, SECRET)
    return ada


def code(secret: str = SECRET) -> str:
    """What the app shows now."""
    return format_hotp_value(hotp_value(secret, int(time.time()) // 30))


def signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def give_password(client: Client, name: str = "ada") -> Any:
    return submit(client, "/login/?next=/account/tokens/", {"username": name, "password": PASSWORD})


def give_code(client: Client, given: str, **request: Any) -> Any:
    return submit(client, "/login/code/", {"code": given}, **request)


def test_a_password_alone_signs_nobody_in_who_has_an_app(client: Client, with_app: User) -> None:
    assert give_password(client)["Location"] == "/login/code/"
    assert not signed_in(client)
    assert client.get("/account/tokens/").status_code == 302
    page = give_code(client, "000000")
    assert "wrong or was already used" in page.content.decode()
    assert not signed_in(client)
    assert give_code(client, code())["Location"] == "/account/tokens/"
    assert signed_in(client)
    entry = AuditEntry.objects.get(action=AuditAction.SIGNED_IN)
    assert entry.changes == {"with": [None, "password, authenticator app"]}


def test_a_code_works_once(client: Client, with_app: User) -> None:
    used = code()
    give_password(client)
    give_code(client, used)
    other = Client()
    give_password(other)
    give_code(other, used)
    assert not signed_in(other)


def test_a_sign_in_link_and_an_invite_end_at_the_second_step_too(client: Client, with_app: User) -> None:
    answer = submit(client, f"/login/{services.make_login_link(with_app)}/")
    assert answer["Location"] == "/login/code/"
    assert not signed_in(client)


def test_a_recovery_code_signs_in_once(client: Client, ada: User) -> None:
    client.force_login(ada)
    codes = set_up(client)
    assert len(codes) == 10
    first, second = Client(), Client()
    for browser in (first, second):
        give_password(browser)
        give_code(browser, codes[0])
    assert signed_in(first)
    assert not signed_in(second)
    assert "9 codes are left" in " ".join(first.get("/account/two-step/").content.decode().split())


def set_up(client: Client) -> list[str]:
    """Turns on an app as a person does; returns the recovery codes."""
    asked = client.get("/account/two-step/app/")
    assert asked["Location"].startswith("/account/confirm/?next=")
    assert submit(client, asked["Location"], {"password": "wrong"}).status_code == 200
    submit(client, asked["Location"], {"password": PASSWORD})
    page = client.get("/account/two-step/app/")
    secret = re.search(r'id="totp-key"\s+value="(\w+)"', page.content.decode())
    assert secret
    assert 'src="data:image/svg+xml;base64,' in page.content.decode()
    done = submit(client, page, {"code": code(secret[1])}, follow=True)
    assert Authenticator.objects.get(type="totp").data["secret"] != secret[1]  # it is encrypted
    return re.findall(r"\b\d{8}\b", done.content.decode())


def test_setting_it_up_needs_the_password_and_shows_codes_once(client: Client, ada: User) -> None:
    client.force_login(ada)
    assert "off" in client.get("/account/").content.decode()
    codes = set_up(client)
    again = client.get("/account/two-step/codes/").content.decode()
    assert not [one for one in codes if one in again]
    entries = AuditEntry.objects.filter(kind=AuditKind.SECOND_STEP).values_list("name", "action")
    assert ("ada", AuditAction.CREATED) in entries
    assert not [one for entry in AuditEntry.objects.all() for one in codes if one in str(entry.changes)]


def test_it_is_turned_off_after_a_confirmation(client: Client, with_app: User) -> None:
    client.force_login(with_app)
    asked = client.get("/account/two-step/app/remove/")
    confirmed = submit(client, asked["Location"], {"password": PASSWORD})
    assert Authenticator.objects.exists()
    submit(client, confirmed["Location"])
    assert not Authenticator.objects.exists()
    assert AuditEntry.objects.filter(kind=AuditKind.SECOND_STEP, action=AuditAction.DELETED, name="ada").exists()


def test_a_form_that_is_sent_long_after_a_confirmation_needs_another_one(client: Client, with_app: User) -> None:
    client.force_login(with_app)
    asked = client.get("/account/two-step/app/remove/")
    form = open_form(client, submit(client, asked["Location"], {"password": PASSWORD})["Location"])
    with override_settings(ACCOUNT_REAUTHENTICATION_TIMEOUT=0):
        asked = form.send()
    assert Authenticator.objects.exists()
    submit(client, asked["Location"], {"password": PASSWORD})
    assert not Authenticator.objects.exists()


def test_wrong_codes_are_limited_for_the_user_from_all_addresses(
    client: Client, with_app: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MOST_CODES", 3)
    give_password(client)
    for last in range(3):
        give_code(client, "000000", REMOTE_ADDR=f"198.51.100.{last}")
    page = give_code(client, code(), REMOTE_ADDR="198.51.100.9").content.decode()
    assert "Too many wrong codes" in page
    assert not signed_in(client)


def test_wrong_codes_and_confirmations_count_for_the_address(
    client: Client, with_app: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MOST", 2)
    give_password(client)
    for _ in range(2):
        give_code(client, "000000")
    assert give_password(Client()).status_code == 429
    other = Client()
    other.force_login(with_app)
    assert submit(other, "/account/confirm/", {"password": PASSWORD}).status_code == 429


def test_a_secret_of_another_key_is_an_error_that_says_what_to_do(
    client: Client, with_app: User, settings: Any
) -> None:
    give_password(client)
    row = Authenticator.objects.get()
    row.data = {"secret": "gAAAAA-of-another-key"}
    row.save()
    assert "Ask an admin to reset it" in give_code(client, code()).content.decode()


def test_an_admin_sees_who_has_it_and_resets_it_which_is_recorded(client: Client, with_app: User) -> None:
    root = make_user("root", is_superuser=True, is_staff=True)
    client.force_login(root)
    listed = client.get("/admin/accounts/user/", {"two_step": "yes"}).content.decode()
    assert "ada" in listed
    assert ">root</a></th>" not in listed
    submit(client, "/admin/accounts/user/", {"action": "reset_two_step", "_selected_action": [with_app.pk]})
    assert not Authenticator.objects.exists()
    entry = AuditEntry.objects.get(kind=AuditKind.SECOND_STEP, action=AuditAction.DELETED)
    assert (entry.actor_name, entry.name) == ("root", "ada")


def test_staff_who_are_no_deployment_admins_reset_nothing(client: Client, with_app: User) -> None:
    """Their page offers no such action."""
    from django.contrib.auth.models import Permission

    staff = make_user("staff", is_staff=True)
    staff.user_permissions.set(Permission.objects.filter(codename__in=["view_user", "change_user"]))
    client.force_login(staff)
    answer = client.post("/admin/accounts/user/", {"action": "reset_two_step", "_selected_action": [with_app.pk]})
    assert answer.status_code == 403
    assert Authenticator.objects.exists()


def test_who_is_locked_out_of_the_only_admin_account_resets_it_on_the_server(with_app: User) -> None:
    call_command("login_link", "--user", "ada")
    assert Authenticator.objects.exists()
    call_command("login_link", "--user", "ada", "--reset-two-step")
    assert not Authenticator.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_an_admin_who_needs_it_can_only_set_it_up(client: Client, settings: Any) -> None:
    settings.DSTACKWEB_TWO_STEP_FOR_ADMINS = True
    root = make_user("root", is_superuser=True, is_staff=True, password=PASSWORD)
    give_password(client, "root")
    for address in ("/", "/admin/", "/account/tokens/"):
        assert client.get(address)["Location"] == "/account/two-step/"
    polled = client.get("/account/tokens/", headers={"HX-Request": "true"})
    assert (polled.status_code, polled["HX-Redirect"]) == (403, "/account/two-step/")
    assert "Admins need two-step sign-in" in client.get("/account/two-step/").content.decode()
    set_up(client)
    assert client.get("/admin/").status_code == 200
    submit(client, "/account/two-step/app/remove/")  # the last one stays
    assert Authenticator.objects.filter(user=root, type="totp").exists()
    assert give_password(Client(), "root")["Location"] == "/login/code/"


def test_others_do_not_need_it_and_tokens_work_without_it(client: Client, ada: User, settings: Any) -> None:
    settings.DSTACKWEB_TWO_STEP_FOR_ADMINS = True
    client.force_login(ada)
    assert client.get("/account/tokens/").status_code == 200
    root = make_user("root", is_superuser=True, is_staff=True)
    _row, token = services.create_token(root, "ci")
    answer = Client().get("/api/v1/projects", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200


def test_beginning_with_a_passkey_is_limited_and_its_session_is_short(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MOST_BEGUN", 2)
    ask = {"Accept": "application/json"}
    for _ in range(2):
        answer = client.get("/login/passkey/", headers=ask)
        assert answer.json()["request_options"]["publicKey"]["challenge"]
    assert client.session.get_expiry_age() <= 900
    assert client.get("/login/passkey/", headers=ask).status_code == 429


def test_what_no_passkey_made_signs_nobody_in(client: Client, ada: User) -> None:
    """The page's script, passkeys.js, fills in the hidden field."""
    form = open_form(client, "/login/", to="/login/passkey/")
    client.get("/login/passkey/", headers={"Accept": "application/json"})
    for sent in ("", "{}", '{"id": "x", "response": {"userHandle": "MQ"}}', "[]"):
        answer = client.post("/login/passkey/", {**form.values, "credential": sent})
        assert answer.status_code in (200, 302, 400)
        assert not signed_in(client)


def test_a_page_makes_no_more_statements_where_it_is_required(
    client: Client, with_app: User, settings: Any, django_assert_num_queries: Any
) -> None:
    User.objects.update(is_superuser=True)
    give_password(client)
    give_code(client, code())
    with CaptureQueriesContext(connection) as before:
        assert client.get("/account/tokens/").status_code == 200
    settings.DSTACKWEB_TWO_STEP_FOR_ADMINS = True
    with django_assert_num_queries(len(before)):
        assert client.get("/account/tokens/").status_code == 200
