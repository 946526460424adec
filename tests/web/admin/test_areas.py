"""The areas of the admin site: complete, and what the product itself keeps is read-only."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from zoneinfo import ZoneInfo

import pytest
from django.apps import apps
from django.contrib.admin.utils import flatten_fieldsets
from django.test import Client, RequestFactory
from django.utils import timezone

from dstackweb.accounts.models import User
from dstackweb.profiles.models import Profile
from dstackweb.runs import services
from dstackweb.runs.models import Run
from dstackweb.runs.sweeps import services as sweeps
from dstackweb.urls import admin  # with all models registered
from dstackweb.web.admin import site
from dstackweb.web.admin.areas import AREA_OF, AREAS
from tests.factories import join, make_host, make_project, make_run, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def root() -> User:
    return make_user("root", is_staff=True, is_superuser=True, time_zone="Asia/Tokyo")


@pytest.fixture
def client(client: Client, root: User) -> Client:
    client.force_login(root)
    return client


def test_each_model_of_the_site_is_in_one_area() -> None:
    registered = [model._meta.label_lower for model in admin.site._registry]
    listed = [entry.model for area in AREAS for entry in area.entries]
    assert sorted(listed) == sorted(registered)


def test_internals_can_only_be_looked_at(root: User) -> None:
    request = RequestFactory().get("/")
    request.user = root
    for label, area in AREA_OF.items():
        options = admin.site._registry[apps.get_model(label)]
        allowed = [options.has_add_permission(request), options.has_delete_permission(request)]
        if area.fixed:
            assert not any([*allowed, options.has_change_permission(request)]), label
        assert options.has_view_permission(request), label


def test_no_page_of_a_row_has_a_field_of_secrets(root: User) -> None:
    request = RequestFactory().get("/")
    request.user = root
    for model, options in admin.site._registry.items():
        fields = {str(name) for name in flatten_fieldsets(options.get_fieldsets(request, model()))}
        secret = {name for name in fields - {"image_digest"} if re.search("secret|cipher|digest|nonce|env", name)}
        assert not secret, model._meta.label


def test_help_of_a_field_names_no_code() -> None:
    for label in AREA_OF:
        for field in apps.get_model(label)._meta.fields:
            assert not re.search("`|[a-z][A-Z]", str(field.help_text)), field


def test_a_sweep_is_as_large_as_the_number_of_its_runs(client: Client, root: User) -> None:
    config = {"type": "task", "name": "lr", "commands": ["true"], "array": 40}
    sweep, _new = sweeps.submit(make_project("vision"), root, "admin", services.Submission(config))
    page = client.get("/admin/runs/sweep/").content.decode()
    assert re.search('class="[^"]*size[^"]*">40<', page)
    assert "40 bytes" not in client.get(f"/admin/runs/sweep/{sweep.pk}/change/").text


def test_the_first_page_counts_rows_and_shows_changes(client: Client, root: User) -> None:
    make_run(make_project("vision"), root, "train")
    Profile.objects.create(name="nightly")
    page = client.get("/admin/").content.decode()
    for text in ("People and access", "Capacity", "profile nightly", "No run starts or is watched"):
        assert text in page
    assert client.get("/admin/runs/", follow=True).redirect_chain == [("/admin/", 302)]


def test_large_tables_are_not_counted_to_their_end(root: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "MOST_COUNTED", 2)
    project = make_project("vision")
    assert site.counted(Run) == "0"
    for name in ("a", "b", "c"):
        make_run(project, root, name)
    assert site.counted(Run) == "2+"


def test_a_list_reads_no_count_of_all_rows_and_rows_with_one_query(
    client: Client, root: User, django_assert_max_num_queries: object
) -> None:
    project = make_project("vision")
    for number in range(6):
        make_run(project, join(project, make_user(f"u{number}")), f"run-{number}")
    with django_assert_max_num_queries(14) as seen:  # type: ignore[operator]  # a fixture without a type
        page = client.get("/admin/runs/run/", {"q": "run"}).content.decode()
    assert "run-5" in page
    asked = [query["sql"] for query in seen.captured_queries if 'FROM "runs_run"' in query["sql"]]
    assert sum("COUNT(" in sql and "LIKE" not in sql for sql in asked) == 0


def test_values_of_lists_have_words_units_and_links(client: Client, root: User) -> None:
    make_host("box-1", memory_gib=64)
    project = make_project("vision")
    run = make_run(project, root, "train")
    page = client.get("/admin/runs/run/").content.decode()
    assert '<span class="st st-submitted">submitted</span>' in page
    assert f'<a href="/admin/accounts/project/{project.pk}/change/">vision</a>' in page
    assert "data-when=ago" in page
    assert "64 GB" in client.get("/admin/backends/host/").content.decode()
    form = client.get(f"/admin/runs/run/{run.pk}/change/").content.decode()
    assert f"/p/vision/runs/{run.uid}/" in form


def test_moments_are_in_the_time_zone_of_the_account(client: Client) -> None:
    project = make_project("vision")
    there = timezone.localtime(project.created_at, ZoneInfo("Asia/Tokyo"))
    page = client.get(f"/admin/accounts/project/{project.pk}/change/").content.decode()
    assert f"{there:%b} {there.day}, {there:%Y, %H:%M}" in page
    assert 'data-admin-utc-offset="32400"' in page
    assert timezone.get_current_timezone_name() == "UTC"


def test_the_history_of_an_object_has_changes_from_everywhere(client: Client) -> None:
    profile = Profile.objects.create(name="nightly", settings={"max_duration": "8h"})
    profile.settings = {"max_duration": "12h", "retry": {"duration": "1h"}}
    profile.save()
    page = client.get(f"/admin/profiles/profile/{profile.pk}/history/").content.decode()
    assert "settings.max_duration: 8h → 12h" in page
    assert "settings.retry.duration: 1h" in page


def test_a_list_without_rows_says_what_to_do(client: Client) -> None:
    assert "Invites: none yet." in client.get("/admin/accounts/invite/").content.decode()
    assert "Clear search and filters" in client.get("/admin/accounts/user/", {"q": "zzz"}).content.decode()


def test_pages_and_filters_of_rows_have_words_for_codes(client: Client, root: User) -> None:
    project = make_project("vision")
    run = make_run(project, root, "train")
    services.stop(run, root, "member")
    pages = {
        lang: client.get(f"/admin/runs/run/{run.pk}/change/", headers={"accept-language": lang}).content.decode()
        for lang in ("en", "zh-hans")
    }
    assert "Stopped by a member. <code>stopped_by_user</code>" in pages["en"]
    assert "Submitted to queue default" in pages["en"]
    assert '<div class="readonly">terminated</div>' in pages["en"]
    assert '<div class="readonly">已停止</div>' in pages["zh-hans"]
    listed = client.get("/admin/runs/run/?status__exact=terminated", headers={"accept-language": "zh-hans"})
    assert re.search(r'href="\?status__exact=terminated"\s*aria-current="true">已停止</a>', listed.content.decode())


def test_what_rows_are_called_has_no_words_of_one_language() -> None:
    """Pages in all languages show it as their title, and the audit log keeps it."""
    for model in admin.site._registry:
        if model.__module__.startswith("dstackweb."):
            source = textwrap.dedent(inspect.getsource(model.__str__))
            words = {*re.findall("[A-Za-z]+", " ".join(_texts(ast.parse(source))))} - {"UTC", "CPU", "s"}
            assert not words, model._meta.label


def _texts(tree: ast.AST) -> Iterator[str]:
    """What a function returns as it stands, and around the values of f-strings."""
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Return) and node.value is not None:
            parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
        yield from (str(part.value) for part in parts if isinstance(part, ast.Constant))
