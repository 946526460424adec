"""Hosts, profiles, health, the start page, errors, and what holds for every page."""

from __future__ import annotations

import datetime as dt
import gzip
import re
from collections.abc import Callable

import pytest
from django.core.cache import caches
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.models import Backend, Gpu, Host, Instance
from dstackweb.lib.models import Bucket, Circuit
from dstackweb.offers import source_rows, store
from dstackweb.offers.models import SourceRow
from dstackweb.runs import history
from dstackweb.runs.models import ProjectLogs
from dstackweb.scheduler.models import Retention, RetentionKind
from dstackweb.web import health
from tests.factories import join, make_host, make_project, make_run, make_user, place_all
from tests.forms import open_form, submit
from tests.web.checks import checks
from tests.web.conftest import HTMX

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
PAGES = ("queue/", "runs/", "submit/", "hosts/", "profiles/", "health/", "members/")


def test_hosts_show_the_run_of_each_gpu_and_foreign_users(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1", cpus=8, gpus=2)
    make_run(project, ann, "holder", resources={"gpu": 1})
    place_all()
    Gpu.objects.filter(index=1).update(stranger={"user": "bob", "pid": 4711})
    page = as_user(ann).get("/p/main/hosts/").content.decode()
    assert ">holder</a>" in page
    assert "used outside dstackweb by bob, pid 4711" in page


def test_the_admin_is_this_products_and_its_pages_find_an_icon(client: Client) -> None:
    root = make_user("root", is_superuser=True, is_staff=True)
    client.force_login(root)
    assert "<title>Admin · dstackweb</title>" in client.get("/admin/").content.decode()
    assert client.get("/favicon.ico")["Location"].endswith(".svg")


def test_runs_of_projects_the_reader_cannot_see_are_not_named(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1", gpus=1)
    elsewhere = make_project("elsewhere")
    make_run(elsewhere, join(elsewhere, make_user("eve")), "secret-plan", resources={"gpu": 1})
    place_all()
    page = as_user(ann).get("/p/main/hosts/").content.decode()
    assert "secret-plan" not in page
    assert "a run of another project" in page


def test_a_poll_of_hosts_is_answered_only_after_a_visible_change(project: Project, ann: User, as_user: SignIn) -> None:
    host = make_host("box-1")
    client = as_user(ann)
    poll = {**HTMX, "HX-PTag": client.get("/p/main/hosts/")["HX-PTag"]}
    Host.objects.filter(pk=host.pk).update(heartbeats=7)
    assert client.get("/p/main/hosts/", headers=poll).status_code == 204
    Host.objects.filter(pk=host.pk).update(draining=True)
    assert "draining" in client.get("/p/main/hosts/", headers=poll).content.decode()


def test_a_silent_host_is_shown_offline(project: Project, ann: User, as_user: SignIn, settings) -> None:
    host = make_host("box-1")
    Host.objects.filter(pk=host.pk).update(silent_s=settings.DSTACKWEB_HOST_SILENT_S + 1)
    assert "offline" in as_user(ann).get("/p/main/hosts/").content.decode()


def test_health_warns_that_jobs_share_the_servers_user(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-1", isolation="shared")
    page = as_user(ann).get("/p/main/health/").content.decode()
    assert "run as the server&#x27;s user" in page


def test_health_shows_what_the_project_stores(project: Project, settings) -> None:
    settings.DSTACKWEB_PROJECT_LOG_GB = 10
    lines = {}
    for used in (0, 9 << 30, 10 << 30):
        ProjectLogs.objects.update_or_create(project=project, defaults={"bytes": used})
        lines[used >> 30] = next(check for check in checks(project) if check.name == "Logs of this project")
    assert [(line.tone, line.value) for line in lines.values()] == [
        ("go", "0 bytes of 10 GB"), ("wait", "9 GB of 10 GB"), ("bad", "10 GB of 10 GB"),
    ]  # fmt: skip
    assert "the runs go on" in lines[10].hint
    code = next(check for check in checks(project) if check.name == "Code of this project")
    assert (code.tone, code.value) == ("go", "0 bytes of 50 GB")


def test_health_shows_the_backlog_of_old_data_and_warns_when_pruning_falls_behind(
    project: Project, ann: User, as_user: SignIn
) -> None:
    now = timezone.now()
    make_host("box-1")
    Retention.note(RetentionKind.RUN_DIRS, "box-1", waiting=12, pruned=300, now=now)
    line = next(check for check in checks(project) if check.name == "Old data")
    assert (line.tone, line.value, line.hint) == ("go", "12 items wait to be pruned", "12 run directories on box-1")
    Retention.objects.update(behind_since=now - dt.timedelta(hours=2))
    Retention.note(RetentionKind.RUN_DIRS, "box-1", waiting=10, pruned=2, now=now)
    assert "12 run directories" not in as_user(ann).get("/p/main/health/").content.decode()
    assert next(check for check in checks(project) if check.name == "Old data").tone == "wait"
    Retention.note(RetentionKind.RUN_DIRS, "box-1", waiting=0, pruned=10, now=now)
    line = next(check for check in checks(project) if check.name == "Old data")
    assert (line.tone, line.value) == ("go", "nothing waits to be pruned")
    assert Retention.objects.get().pruned == 312


def test_health_shows_that_the_offers_cache_is_unreachable(
    project: Project, ann: User, as_user: SignIn, monkeypatch
) -> None:
    def away(*_: object) -> None:
        raise ConnectionError("Connection refused")

    assert "unavailable" not in as_user(ann).get("/p/main/health/").content.decode()
    monkeypatch.setattr(caches["offers"], "get", away)
    page = as_user(ann).get("/p/main/health/").content.decode()
    assert "unavailable" in page
    assert "ConnectionError: Connection refused" in page
    store.forget()


def test_health_shows_apis_at_their_rate_limit_and_throttled_ones(project: Project, ann: User, as_user: SignIn) -> None:
    def page() -> str:
        return as_user(ann).get("/p/main/health/").content.decode()

    assert "Rate limits of AWS EC2" not in page()
    Bucket.reserve("aws:1:eu-west-1:ec2.RunInstances", 1, 3, 30)
    assert "below the limit" in page()
    for _call in range(40):
        Bucket.reserve("aws:1:eu-west-1:ec2.RunInstances", 1, 3, 60)
    assert "Calls wait: ec2.RunInstances (eu-west-1)." in page()
    Circuit.throttled("aws:1:eu-west-1:ec2.RunInstances", timezone.now(), rnd=lambda: 1.0)
    assert "Not called until then: ec2.RunInstances" in page()


def test_health_shows_why_a_cloud_cannot_be_reached_and_sends_no_request(
    project: Project, ann: User, as_user: SignIn, settings
) -> None:
    page = as_user(ann).get("/p/main/health/").content.decode()
    assert "sources fresh" not in page
    backend = Backend.objects.create(name="cloud", kind="aws", config={"regions": ["eu-west-1"]})
    error = {"code": "access_denied", "action": "ec2:X", "region": "eu-west-1"}
    digest = source_rows.digest(backend, AwsBackend.sources["quotas"])
    SourceRow.objects.create(
        backend=backend, source="quotas", region="eu-west-1", digest=digest, failed_at=timezone.now(), error=error
    )
    page = as_user(ann).get("/p/main/health/").content.decode()
    assert "of 5 sources fresh" in page
    assert "lacks ec2:X" in page
    assert "Set DSTACKWEB_PUBLIC_URL" in page
    settings.DSTACKWEB_PUBLIC_URL = "https://gpus.example.org"
    assert "Set DSTACKWEB_PUBLIC_URL" not in as_user(ann).get("/p/main/health/").content.decode()


def test_health_shows_instances_that_do_not_terminate(project: Project, ann: User, as_user: SignIn) -> None:
    backend = Backend.objects.create(name="cloud", kind="aws", config={"regions": ["eu-west-1"]})
    machine = Instance.objects.create(
        backend=backend, project=project, region="eu-west-1", instance_type="g5.xlarge", status="stopping",
        cloud_id="i-stuck", status_s=60,
    )  # fmt: skip
    page = as_user(ann).get("/p/main/health/").content.decode()
    assert "1 terminating" in page
    assert "i-stuck" not in page
    Instance.objects.filter(pk=machine.pk).update(status_s=1000)
    assert "i-stuck (eu-west-1)" in as_user(ann).get("/p/main/health/").content.decode()


def test_health_groups_its_checks_and_begins_with_what_needs_attention(
    project: Project, ann: User, as_user: SignIn
) -> None:
    make_host("away", silent_s=1e6)
    found = health.areas(project)
    assert found[0].tone == "bad"
    assert [health.TONES.index(area.tone) for area in found] == sorted(
        (health.TONES.index(area.tone) for area in found), reverse=True
    )
    hosts = next(area for area in found if area.name == "Hosts and jobs")
    assert hosts.faults[0].check.host == "away"
    assert not any(line.check.tone in ("bad", "wait") for area in found for line in area.fine)
    page = as_user(ann).get("/p/main/health/").content.decode()
    assert 'href="/p/main/hosts/away/"' in page
    assert 'href="/p/main/history/"' in page


def test_health_shows_how_many_runs_waited_in_the_last_day(project: Project, ann: User, as_user: SignIn) -> None:
    make_run(project, ann)
    place_all()
    make_run(project, ann, resources={"cpu": 999})
    now = timezone.now()
    for at in (now - dt.timedelta(hours=1), now):
        history.sample_lengths(at)
    page = as_user(ann).get("/p/main/health/").content.decode()
    assert "Waiting runs in the last 24 hours, max" in page


def test_health_is_read_even_when_a_check_breaks(project: Project, ann: User, as_user: SignIn, monkeypatch) -> None:
    def broken(_name: str) -> None:
        raise ConnectionError("the broker is away")

    monkeypatch.setattr("dstackweb.web.health.get_broker", broken)
    answer = as_user(ann).get("/p/main/health/")
    assert answer.status_code == 200
    assert "the broker is away" in answer.content.decode()


def test_profiles_show_their_settings_and_which_is_the_default(project: Project, ann: User, as_user: SignIn) -> None:
    page = as_user(ann).get("/p/main/profiles/").content.decode()
    assert "max_duration" in page
    assert "24h" in page
    assert re.search(r'dw-tag-go">\s*default', page)


def test_the_start_page_redirects_to_a_queue_or_explains_how_to_join_a_project(
    project: Project, ann: User, as_user: SignIn
) -> None:
    assert as_user(ann).get("/")["Location"] == "/p/main/queue/"
    lonely = as_user(make_user("lonely")).get("/")
    assert "not a member of any project" in lonely.content.decode()
    assert Client().get("/")["Location"].startswith("/login/")


def test_no_page_needs_an_inline_script_style_or_handler(project: Project, ann: User, as_user: SignIn) -> None:
    """The Content-Security-Policy forbids them, and htmx's own ways to evaluate text as code."""
    make_host("box-1", gpus=1)
    run = make_run(project, ann, "shown")
    place_all()
    client = as_user(ann)
    for path in (*PAGES, f"runs/{run.name}/"):
        page = client.get(f"/p/main/{path}").content.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|hx-on|javascript:", page), path
        assert not re.search(r'hx-trigger="[^"]*\[', page), path
        assert not re.search(r"https?://", page.replace('xmlns="http://www.w3.org/2000/svg"', "")), path


def test_element_ids_of_a_page_are_unique(project: Project, ann: User, as_user: SignIn) -> None:
    """A morph finds its elements by id."""
    make_host("box-1", gpus=1)
    run = make_run(project, ann, "shown")
    place_all()
    make_run(project, ann, "waits", resources={"gpu": 1}, priority=20)
    client = as_user(ann)
    for path in (*PAGES, f"runs/{run.name}/"):
        ids = re.findall(r'\sid="([^"]+)"', client.get(f"/p/main/{path}").content.decode())
        assert len(ids) == len(set(ids)), path


def test_names_and_texts_of_people_are_shown_as_text(project: Project, ann: User, as_user: SignIn) -> None:
    config = "type: task\nname: sly\ncommands:\n  - echo '<script>alert(1)</script>'\n"
    make_host()
    submit(as_user(ann), "/p/main/submit/", {"config": config}, button="Submit")
    page = as_user(ann).get("/p/main/runs/sly/").content.decode()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_error_pages_have_the_layout_of_other_pages(project: Project, ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    missing = client.get("/p/main/runs/nope/")
    assert missing.status_code == 404
    assert "No run is called &#x27;nope&#x27; in main." in missing.content.decode()
    nowhere = client.get("/no/such/page")
    assert nowhere.status_code == 404
    assert "This page does not exist" in nowhere.content.decode()


def test_an_internal_error_page_shows_no_context(as_user: SignIn, monkeypatch, ann: User) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("dstackweb.web.queue.views.selectors.list_version", broken)
    client = as_user(ann)
    client.raise_request_exception = False
    answer = client.get("/p/main/queue/")
    assert answer.status_code == 500
    assert "Something went wrong" in answer.content.decode()
    assert "boom" not in answer.content.decode()


def test_an_address_with_a_nul_is_not_found(project: Project, ann: User, as_user: SignIn) -> None:
    for path in ("/p/main/runs/a%00b/", "/p/ma%00in/queue/", "/p/main/runs/?q=%00"):
        assert as_user(ann).get(path).status_code in (200, 404), path


def test_pages_are_sent_compressed_and_the_api_as_it_is(project: Project, ann: User, as_user: SignIn) -> None:
    client = as_user(ann)
    for path, encoding in (("/p/main/queue/", "gzip"), ("/api/v1/openapi.json", None)):
        answer = client.get(path, headers={"Accept-Encoding": "gzip, br"})
        assert answer.status_code == 200
        assert answer.headers.get("Content-Encoding") == encoding
    page = client.get("/p/main/queue/", headers={"Accept-Encoding": "gzip"})
    assert b'id="queue"' in gzip.decompress(page.content)


def test_a_form_sent_after_the_session_ended_leads_back_to_its_page(
    project: Project, mia: User, as_user: SignIn
) -> None:
    client, sent = as_user(mia), "/p/main/queues/default/settings/"
    form = open_form(client, sent, having="paused")
    client.logout()
    for referer, back in {
        "": sent,
        "http://testserver/p/main/queues/default/settings/?a=1": "/p/main/queues/default/settings/%3Fa%3D1",
        "https://elsewhere.example/x": "/",
        "http://testserver/p/main/queues/default/undo/": "/p/main/queues/default/",
    }.items():
        answer = client.post(sent, form.values, headers={"Referer": referer})
        assert answer["Location"] == f"/login/?next={back}"
    assert client.get(f"{sent}?a=1")["Location"] == f"/login/?next={sent}%3Fa%3D1"
