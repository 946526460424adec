"""The page of one's own account: name, address, time zone."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import User
from dstackweb.audit.models import AuditEntry
from tests.factories import make_user
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"


@pytest.fixture
def ada() -> User:
    return make_user("ada", password=PASSWORD)


@pytest.fixture
def page(ada: User) -> Client:
    client = Client()
    client.force_login(ada)
    return client


@pytest.mark.slow
def test_name_and_time_zone_are_saved_and_all_pages_use_the_zone(page: Client, ada: User) -> None:
    submit(page, "/account/", {"first_name": "Ada", "last_name": "Lovelace", "time_zone": "Europe/London"})
    ada.refresh_from_db()
    assert ada.get_full_name() == "Ada Lovelace"
    assert 'data-zone="Europe/London"' in page.get("/account/tokens/").content.decode()
    submit(page, "/account/", {"last_name": "", "time_zone": ""})
    assert "data-zone" not in page.get("/account/tokens/").content.decode()


def test_a_time_zone_that_the_page_does_not_offer_is_an_error_at_its_field(page: Client, ada: User) -> None:
    answer = page.post("/account/", {**open_form(page, "/account/").values, "time_zone": "Europe/Atlantis"})
    assert answer.status_code == 422
    assert answer.context["form"].errors.keys() == {"time_zone"}
    assert 'data-zone="Europe/Atlantis"' not in answer.content.decode()


def test_a_new_mail_address_needs_the_password_and_is_recorded(page: Client, ada: User) -> None:
    asked = submit(page, "/account/", {"email": "ada@example.org"})
    ada.refresh_from_db()
    assert ada.email == ""
    submit(page, asked["Location"], {"password": PASSWORD})
    ada.refresh_from_db()
    assert ada.email == "ada@example.org"
    assert AuditEntry.objects.filter(name="ada", changes__email=["", "ada@example.org"]).exists()


def test_the_address_of_another_account_is_refused(page: Client, ada: User) -> None:
    make_user("bob", email="bob@example.org")
    answer = submit(page, "/account/", {"email": "BOB@example.org"})
    assert answer.context["form"].errors.keys() == {"email"}


def test_a_language_is_chosen_only_where_there_are_several(page: Client, settings: Any) -> None:
    assert "简体中文" in page.get("/account/").text
    settings.LANGUAGES = [("en", "English")]
    text = page.get("/account/").text
    assert "Language</label>" not in text
    assert 'action="/language/"' not in text


def test_the_user_menu_leads_there(page: Client) -> None:
    assert 'href="/account/"' in page.get("/account/tokens/").content.decode()
