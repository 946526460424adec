"""What holds for every page: readable by everybody, in both themes, on a phone, under the strict policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Page, Request, expect

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Host
from dstackweb.profiles.models import Profile
from dstackweb.runs.models import Queue, Run
from dstackweb.urls import admin  # with all models registered
from tests.browser import demo
from tests.browser.conftest import Complaints
from tests.browser.support import LOOKS, Look, check_now, check_pages, sign_in
from tests.factories import join, make_project, make_user
from tests.support import is_nightly

AN_HOUR_AGO = f"{datetime.now(UTC) - timedelta(hours=1):%Y-%m-%dT%H:%MZ}"
PAGES = {
    "queue": "/p/main/queue/",
    "queue-transfer": "/p/main/queues/default/transfer/?name=ab-reranker-7",
    "queue-paused": "/p/main/queues/night/",
    "queue-settings": "/p/main/queues/night/settings/",
    "queue-empty": "/p/research/queue/",
    "queue-past": f"/p/main/queues/default/at/?t={AN_HOUR_AGO}&run=ab-reranker-7",
    "queue-past-empty": f"/p/research/queues/default/at/?t={AN_HOUR_AGO}",
    "queue-past-unknown": "/p/main/queues/night/at/?t=2020-01-01",
    "history": "/p/main/queues/default/history/",
    "history-all": "/p/main/history/?days=30",
    "history-table": "/p/main/queues/default/history/?as=table",
    "history-empty": "/p/research/history/",
    "usage": "/p/main/usage/",
    "usage-empty": "/p/research/usage/?by=queue",
    "runs": "/p/main/runs/",
    "run": "/p/main/runs/train-llama-sft/",
    "run-failed": "/p/main/runs/export-onnx/",
    "run-waiting": "/p/main/runs/ab-reranker-7/",
    "run-held": "/p/main/runs/hold-swift-otter/",
    "run-scheduled": "/p/main/runs/report-nightly/",
    "sweeps": "/p/main/sweeps/",
    "sweep": "/p/main/sweeps/lr-grid/",
    "artifact-picture": "/p/main/runs/train-llama-sft/artifacts/?path=plots/loss.png",
    "artifact-table": "/p/main/runs/train-llama-sft/artifacts/?path=metrics.csv",
    "artifact-text": "/p/main/runs/train-llama-sft/artifacts/?path=report.html",
    "artifact-other": "/p/main/runs/train-llama-sft/artifacts/?path=adapter.safetensors",
    "compare": "/p/main/compare/?run=train-llama-sft&run=export-onnx",
    "compare-choose": "/p/main/compare/",
    "progress": "/p/main/progress/",
    "progress-run": "/p/main/runs/train-llama-sft/progress/",
    "progress-wall": "/p/main/progress/wall/",
    "progress-prefix": "/p/main/progress/prefix/?prefix=sweep-lr",
    "why": "/p/main/runs/ab-reranker-7/why/",
    "why-never": "/p/main/runs/too-large/why/",
    "why-queued": "/p/main/runs/evaluate-checkpoint-of-the-long-named-experiment/why/",
    "why-running": "/p/main/runs/train-llama-sft/why/",
    "submit": "/p/main/submit/",
    "hold": "/p/main/hold/",
    "hosts": "/p/main/hosts/",
    "utilization": "/p/main/utilization/",
    "profiles": "/p/main/profiles/",
    "audit": "/p/main/audit/?all=yes",
    "health": "/p/main/health/",
    "members": "/p/main/members/",
    "secrets": "/p/main/secrets/",
    "account": "/account/",
    "two-step": "/account/two-step/",
    "confirm": "/account/confirm/",
    "tokens": "/account/tokens/",
    "ssh-keys": "/account/ssh-keys/",
    "browsers": "/account/sessions/",
    "notifications": "/account/notifications/",
    "notification-settings": "/account/notifications/settings/",
    "channel": f"/account/notifications/channels/{demo.CHANNEL}/",
    "project-notifications": "/p/main/notifications/",
    "password": "/account/password/",
    "not-found": "/p/main/runs/nope/",
}


def admin_pages() -> dict[str, str]:
    """Lists, forms, histories and questions of the admin site, below its address; by day one of each kind."""
    run, queue, host = Run.objects.filter(status="running")[0], Queue.objects.all()[0], Host.objects.all()[0]
    mia, main, profile = User.objects.get(username="mia"), Project.objects.get(name="main"), Profile.objects.all()[0]
    by_day = {
        "index": "",
        "project-delete": f"accounts/project/{Project.objects.get(name='research').pk}/delete/",
        "project-history": f"accounts/project/{main.pk}/history/",
        "queue": f"runs/queue/{queue.pk}/change/",
        "runs": "runs/run/",
        "run": f"runs/run/{run.pk}/change/",
        "empty": "runs/sweep/?q=none",
        "profile": f"profiles/profile/{profile.pk}/change/",
        "backend-add": "backends/backend/add/",
        "host": f"backends/host/{host.pk}/change/",
        "audit": "audit/auditentry/",
    }
    if not is_nightly():
        return by_day
    models = [model._meta for model in admin.site._registry]
    return {
        **by_day,
        **{f"list-{meta.label_lower}": f"{meta.app_label}/{meta.model_name}/" for meta in models},
        "users": "accounts/user/",
        "user": f"accounts/user/{mia.pk}/change/",
        "user-add": "accounts/user/add/",
        "user-password": f"accounts/user/{mia.pk}/password/",
        "token-add": "accounts/apitoken/add/",
        "group-add": "auth/group/add/",
        "project": f"accounts/project/{main.pk}/change/",
        "project-delete-refused": f"accounts/project/{main.pk}/delete/",
        "profile-yaml": f"profiles/profile/{profile.pk}/change/?as=yaml",
        "profile-delete": f"profiles/profile/{profile.pk}/delete/",
        "hosts": "backends/host/",
        "verdicts": "runs/verdict/",
        "job": f"runs/job/{run.jobs.all()[0].pk}/change/",
    }


BY_DAY_AND_AT_NIGHT = pytest.mark.parametrize(
    "looks", [LOOKS[:2], pytest.param(LOOKS[2:], marks=pytest.mark.nightly)], ids=["two looks", "the others"]
)


@pytest.mark.deeper
@pytest.mark.django_db(transaction=True)
@BY_DAY_AND_AT_NIGHT
def test_every_page_is_accessible_and_fits_in_both_themes(
    live_server, new_page: Callable[..., Page], complaints: Complaints, looks: Sequence[Look]
) -> None:
    demo.sweep(*demo.build())
    page = new_page(reduced_motion="reduce")
    check_pages(page, {"login": f"{live_server.url}/login/"}, looks)
    sign_in(page, live_server.url, "mia")
    check_pages(page, {name: live_server.url + path for name, path in PAGES.items()}, looks)
    complaints.remove_failed_loads()  # the page that is not found


@pytest.mark.deeper
@pytest.mark.django_db(transaction=True)
@BY_DAY_AND_AT_NIGHT
def test_every_page_of_the_admin_site_is_accessible_and_fits(
    live_server, new_page: Callable[..., Page], complaints: Complaints, looks: Sequence[Look]
) -> None:
    demo.sweep(*demo.build())
    page = new_page(reduced_motion="reduce")
    sign_in(page, live_server.url, "root")
    check_pages(
        page, {f"admin-{name}": f"{live_server.url}/admin/{path}" for name, path in admin_pages().items()}, looks
    )


@pytest.mark.nightly
@pytest.mark.django_db(transaction=True)
def test_the_page_of_a_quiet_running_run_makes_at_most_thirty_requests_a_minute(
    live_server, new_page: Callable[..., Page]
) -> None:
    demo.build()
    page = new_page(keep=False)
    page.clock.install()
    sign_in(page, live_server.url, "mia")
    open_requests: set[Request] = set()
    page.on("request", lambda request: open_requests.add(request))
    page.on("requestfinished", lambda request: open_requests.discard(request))
    page.on("requestfailed", lambda request: open_requests.discard(request))
    asked: list[str] = []

    def pass_seconds(seconds: int) -> None:
        """Each answer comes at once, by the page's clock."""
        for _ in range(2 * seconds):
            page.clock.run_for(500)
            while open_requests:
                page.wait_for_timeout(5)

    page.goto(f"{live_server.url}/p/main/runs/train-llama-sft/")
    expect(page.locator("[data-log-text]")).to_contain_text("saved checkpoint")
    pass_seconds(30)
    page.on("request", lambda request: asked.append(request.url))
    pass_seconds(60)
    assert 15 <= len(asked) <= 30, asked


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("width", [1360, 390])
def test_the_sidebars_groups_stay_closed_and_projects_are_found_by_name(
    live_server, new_page: Callable[..., Page], width: int
) -> None:
    ann = make_user("ann")
    for name in ("main", *(f"team-{number}" for number in range(8))):
        join(make_project(name), ann)
    page = new_page(color_scheme="dark", viewport={"width": width, "height": 844})
    sign_in(page, live_server.url, "ann")
    page.goto(f"{live_server.url}/p/main/gpus/")

    def show() -> None:
        if width < 992:
            page.get_by_role("button", name="Menu").click()

    show()
    page.locator("summary", has_text="Team").press("Enter")
    expect(page.get_by_role("link", name="Usage")).to_be_hidden()
    page.locator("summary", has_text="Work").click()
    page.locator("summary", has_text="Work").click()
    page.reload()
    show()
    expect(page.get_by_role("link", name="Usage")).to_be_hidden()
    expect(page.get_by_role("link", name="Progress")).to_be_visible()

    page.locator("summary", has_text="main").press("Enter")
    search = page.get_by_label("Search projects")
    expect(search).to_be_focused()
    check_now(page, "sidebar")
    page.keyboard.type("TEAM-7")
    expect(page.locator(".dw-project li:visible")).to_have_text("team-7")
    search.fill("nothing")
    expect(page.get_by_text("Nothing matches.")).to_be_visible()
    search.fill("team")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("link", name="team-1")).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url("**/p/team-1/gpus/")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("theme", "width"), [pytest.param("light", 1360, marks=pytest.mark.nightly), ("dark", 390)])
def test_dialogs_and_menus_are_accessible_and_fit(
    live_server,
    new_page: Callable[..., Page],
    complaints: Complaints,
    theme: str,
    width: int,
) -> None:
    demo.build()
    page = new_page(color_scheme=theme, viewport={"width": width, "height": 844}, reduced_motion="reduce")
    sign_in(page, live_server.url, "root")
    page.goto(f"{live_server.url}/p/main/hosts/")
    page.get_by_role("button", name="Create join command").click()
    expect(page.get_by_label("Run this on the new host, as root")).to_have_value(re.compile("host join"))
    check_now(page, "hosts-join")
    page.get_by_role("button", name="Remove").first.click()
    expect(page.get_by_role("dialog")).to_contain_text("Remove host cpu-box-2?")
    check_now(page, "hosts-remove")
    page.context.clear_cookies()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/hold/")
    page.get_by_label("GPUs", exact=True).fill("99")
    page.get_by_role("button", name="Hold", exact=True).click()
    page.get_by_text("This hold cannot start").wait_for()
    check_now(page, "hold-never")
    page.goto(f"{live_server.url}/p/main/queue/")
    page.get_by_role("button", name="Actions for hotfix-serving").click()
    page.get_by_role("menuitem", name="Stop").click()
    check_now(page, "queue-confirm")
    page.keyboard.press("Escape")
    if width < 1000:
        page.get_by_role("button", name="Menu").click()
        check_now(page, "menu")
    complaints.remove_failed_loads()  # the hold that cannot start


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("theme", "width"), [("light", 1360), pytest.param("dark", 390, marks=pytest.mark.nightly)])
def test_moves_of_rows_are_accessible_and_fit(
    live_server, new_page: Callable[..., Page], theme: str, width: int
) -> None:
    demo.build()
    page = new_page(color_scheme=theme, viewport={"width": width, "height": 844}, reduced_motion="reduce")
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/queue/")

    row = page.locator("#waiting tr", has_text="sweep-lr-0030")
    for fact in row.locator(".q-fact").all():  # what it needs, how long it waits, when it starts
        expect(fact).to_be_visible()
    box = row.get_by_role("checkbox").bounding_box()
    assert box
    assert min(box["width"], box["height"]) >= 24
    handle = page.get_by_role("button", name="Move sweep-lr-0030")
    handle.press("ArrowUp")
    expect(page.locator(".would")).to_contain_text("position 3 → 2")
    check_now(page, "queue-carried")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    check_now(page, "queue-moved")
    handle.press("Enter")
    check_now(page, "queue-menu")
    page.get_by_role("menuitem", name="Before…").click()
    page.get_by_label("Reference run").fill("nobody")
    expect(page.locator("#place [data-effect]")).to_contain_text("No waiting run named nobody")
    check_now(page, "queue-place")
    page.keyboard.press("Escape")
    page.get_by_role("checkbox", name="Select sweep-lr-0032").check()
    page.get_by_role("checkbox", name="Select too-large").check()
    check_now(page, "queue-chosen")


@pytest.mark.django_db(transaction=True)
def test_the_plan_and_its_errors_are_accessible_and_the_offending_line_is_marked(
    live_server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    demo.build()
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/submit/")
    page.get_by_label("Run file", exact=True).fill("type: task\ncommands: [echo]\nresurces: {gpu: 1}\n")
    page.get_by_role("button", name="Line 3").wait_for()
    assert page.locator("[data-gutter] .bad").all_text_contents() == ["3"]
    check_now(page, "submit-error")
    assert page.locator(".dw-toast").count() == 0  # said beside the field, and not once more
    page.get_by_role("button", name="Line 3").click()
    assert page.evaluate("getSelection().toString()") == "resurces: {gpu: 1}"
    complaints.remove_failed_loads()  # the 422 that was asked for

    page.get_by_label("Run file", exact=True).fill("type: task\ncommands: [echo]\nresources: {gpu: 99}\n")
    page.get_by_label("Submit anyway").wait_for()
    assert page.locator("[data-gutter] .bad").count() == 0
    check_now(page, "submit-plan")
    page.get_by_role("button", name="Submit and wait").click()
    expect(page.get_by_role("alert")).to_contain_text("Nothing was submitted yet")
    expect(page.get_by_label("Submit anyway")).to_be_focused()
    check_now(page, "submit-asked")
    complaints.remove_failed_loads()  # the 422 that asks
    page.keyboard.press("Space")
    page.get_by_role("button", name="Submit and wait").click()
    page.wait_for_url("**/runs/**")


@pytest.mark.django_db(transaction=True)
def test_the_chosen_theme_is_there_before_the_page_is_drawn_and_stays(
    live_server, new_page: Callable[..., Page]
) -> None:
    demo.build()
    page = new_page(color_scheme="light", keep=False)
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/queue/")
    page.get_by_role("radio", name="Dark").click()
    page.add_init_script(
        "new MutationObserver(() => window.first ??= document.body && document.documentElement.dataset.bsTheme)"
        ".observe(document, {childList: true, subtree: true})"
    )
    page.reload()
    assert page.evaluate("window.first") == "dark"
    assert page.get_by_role("radio", name="Dark").get_attribute("aria-checked") == "true"
    page.keyboard.press("Tab")
    page.get_by_role("radio", name="Dark").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.documentElement.dataset.bsTheme") == "light"


@pytest.mark.django_db(transaction=True)
def test_on_a_phone_the_menu_opens_and_its_links_work(live_server, new_page: Callable[..., Page]) -> None:
    demo.build()
    page = new_page(viewport={"width": 390, "height": 844})
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/queue/")
    menu = page.get_by_role("button", name="Menu")
    assert not page.get_by_role("link", name="Hosts").is_visible()
    menu.click()
    assert menu.get_attribute("aria-expanded") == "true"
    page.get_by_role("link", name="Hosts").click()
    page.wait_for_url("**/hosts/")
