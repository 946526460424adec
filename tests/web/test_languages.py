"""Pages are in the language of their reader: chosen, else the browser's, else English."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.test import Client
from django.utils import translation

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import create_token
from dstackweb.lib.errors import Invalid
from dstackweb.notifications import channels, password_mail, sending
from dstackweb.notifications.models import ChannelKind
from dstackweb.spec.run_file import parse_profile_settings
from dstackweb.wording import units
from tests.factories import join, make_project, make_user
from tests.forms import submit

pytestmark = pytest.mark.django_db
CHINESE = {"accept-language": "zh-CN,zh;q=0.9,en;q=0.8"}


@pytest.fixture(autouse=True)
def english_again() -> Iterator[None]:
    """Requests leave their language with their thread, which in a server begins each with another."""
    yield
    translation.activate("en")


@pytest.fixture
def mia() -> User:
    return join(make_project("main"), make_user("mia", email="mia@example.org"), "manager")


@pytest.fixture
def browser(mia: User) -> Client:
    client = Client()
    client.force_login(mia)
    return client


def language(answer: Any) -> str:
    return str(answer.headers["Content-Language"])


def choose(client: Client, code: str, page: str = "/account/") -> Any:
    return submit(client, page, to="/language/", button=f"language={code}")


@pytest.mark.parametrize(
    ("accepted", "code"),
    [("zh-CN,zh;q=0.9", "zh-hans"), ("zh", "zh-hans"), ("de,zh-Hans;q=0.5", "zh-hans"), ("de", "en"), ("", "en")],
)
def test_the_browser_says_the_language_before_anybody_chose_one(accepted: str, code: str) -> None:
    page = Client().get("/login/", headers={"accept-language": accepted})
    assert language(page) == code
    assert f'<html lang="{code}"' in page.text
    assert "Accept-Language" in page.headers["Vary"]
    assert ("登录" in page.text) == (code == "zh-hans")


def test_a_choice_before_signing_in_is_kept_by_the_browser_and_leads_back() -> None:
    client = Client()
    answer = choose(client, "zh-hans", "/login/?next=/account/")
    assert (answer.status_code, answer["Location"]) == (302, "/login/?next=/account/")
    page = client.get("/login/")
    assert language(page) == "zh-hans"
    assert '<button name="language"' in page.text
    assert 'lang="zh-hans"' in page.text


def test_nobody_is_sent_to_another_site_or_to_a_language_that_is_not_there(browser: Client, mia: User) -> None:
    """By fields that no page sends."""
    away = browser.post("/language/", {"language": "zh-hans", "next": "https://evil.example/"})
    assert away["Location"] == "/"
    browser.post("/language/", {"language": "xx", "next": "/account/"})
    mia.refresh_from_db()
    assert mia.language == "zh-hans"


def test_a_choice_in_the_menu_follows_the_account_to_another_browser(browser: Client, mia: User) -> None:
    assert language(browser.get("/account/")) == "en"
    choose(browser, "zh-hans")
    other = Client()
    other.force_login(mia)
    page = other.get("/account/", headers={"accept-language": "en"})
    assert language(page) == "zh-hans"
    assert "我的账户" in page.text


def test_the_account_page_sets_the_language_and_gives_it_back_to_the_browser(browser: Client, mia: User) -> None:
    submit(browser, "/account/", {"language": "zh-hans"}, to="/account/")
    assert language(browser.get("/p/main/queue/")) == "zh-hans"
    submit(browser, "/account/", to="/logout/")
    assert language(browser.get("/login/")) == "zh-hans"
    browser.force_login(mia)
    submit(browser, "/account/", {"language": ""}, to="/account/")
    assert language(browser.get("/account/")) == "en"
    assert language(browser.get("/account/", headers=CHINESE)) == "zh-hans"


@pytest.mark.parametrize(
    ("page", "changes", "to"),
    [
        ("/account/tokens/", {"name": "environment"}, "/account/tokens/"),
        ("/account/notifications/settings/", {"kind": "slack", "name": "x", "url": "x"}, "/account/notifications/"),
    ],
)
def test_a_choice_on_a_page_that_refuses_a_form_leads_to_one_that_can_be_opened(
    browser: Client, page: str, changes: dict[str, str], to: str
) -> None:
    refused = submit(browser, page, changes)
    again = submit(browser, refused, changes)
    assert (refused.status_code, again.status_code) == (422, 422)
    assert choose(browser, "zh-hans", again)["Location"] == to
    assert browser.get(to).status_code == 200


def test_fragments_of_a_page_are_in_its_language_also_after_another_choice(browser: Client) -> None:
    page = browser.get("/p/main/queue/")
    assert '"DW-Language": "en"' in page.text
    choose(browser, "zh-hans")
    poll = browser.get("/p/main/queue/", headers={"HX-Request": "true", "DW-Language": "en"})
    assert language(poll) == "en"
    assert language(browser.get("/p/main/queue/", headers={"HX-Request": "true"})) == "zh-hans"


@pytest.mark.parametrize("path", ["/p/main/runs/nope/", "/nowhere/", "/p/other/queue/"])
def test_pages_of_errors_are_translated(browser: Client, path: str) -> None:
    choose(browser, "zh-hans")
    page = browser.get(path)
    assert page.status_code == 404
    assert '<html lang="zh-hans"' in page.text
    assert not translation.to_locale(settings.LANGUAGE_CODE).startswith("zh")


def test_the_admin_site_is_translated_with_the_names_of_its_models(mia: User) -> None:
    User.objects.filter(pk=mia.pk).update(is_staff=True, is_superuser=True, language="zh-hans")
    client = Client()
    client.force_login(User.objects.get(pk=mia.pk))
    page = client.get("/admin/accounts/project/add/").text
    assert "每月预算" in page
    assert "成员可设置的最高优先级" in page


def test_errors_of_the_api_are_in_the_language_that_the_request_accepts(mia: User) -> None:
    User.objects.filter(pk=mia.pk).update(language="en")
    token = create_token(mia, "test")[1]
    client = Client()

    def detail(**headers: str) -> str:
        answer = client.get("/api/v1/projects/main/runs/nope", headers={"authorization": f"Bearer {token}", **headers})
        assert answer.status_code == 404
        return str(answer.json()["detail"])

    assert detail() == "no run is called 'nope' in main"
    assert detail(**CHINESE) == "main 中没有名为 'nope' 的运行任务"


def test_errors_of_a_run_file_are_translated() -> None:
    with translation.override("zh-hans"), pytest.raises(Invalid) as caught:
        parse_profile_settings("max_duration: soon")
    assert "`max_duration` 应为" in caught.value.detail


def test_the_mail_for_a_new_password_is_in_the_language_of_its_account_or_of_the_page(
    mia: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr("dstackweb.notifications.mail.send", lambda _to, subject, *_rest: sent.append(subject))
    password_mail.send(mia.pk, "https://gpus.example.org", "en")
    password_mail.send(mia.pk, "https://gpus.example.org", "zh-hans")
    User.objects.filter(pk=mia.pk).update(language="zh-hans")
    password_mail.send(mia.pk, "https://gpus.example.org", "en")
    assert sent[0] == "New password for dstackweb"
    assert sent[1] == sent[2] != sent[0]


def test_messages_of_a_channel_are_in_its_users_language_or_that_in_which_it_was_set_up(mia: User) -> None:
    with translation.override("zh-hans"):
        own = channels.create(mia, ChannelKind.EMAIL, "mail")
        shared = channels.create(Project.objects.get(), ChannelKind.SLACK, "team", "https://hooks.example.org/x")
    assert (sending._language(own), sending._language(shared)) == ("zh-hans", "zh-hans")
    mia.language = "en"
    own.user = mia
    assert sending._language(own) == "en"


def test_durations_are_written_with_the_units_of_the_language_also_by_scripts() -> None:
    assert units.duration(7500) == "2 h 5 min"
    with translation.override("zh-hans"):
        assert units.duration(7500) == "2 小时 5 分钟"
        assert units.for_scripts()["s"] == "%s 秒"
