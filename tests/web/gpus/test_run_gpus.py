"""The GPUs on a run's page: how they are used, how the run stands with its policy, keeping it; and marks in lists."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Host
from dstackweb.gpus import intake
from dstackweb.gpus.models import HostSampling, JobPolicy, PolicyExemption, PolicyStop, ProjectPolicies
from dstackweb.profiles.models import Profile
from dstackweb.runs import attempts, services
from dstackweb.runs.models import Job, Run
from dstackweb.scheduler.utilization import PolicyAction, apply_policy
from dstackweb.web.gpus import alerts
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job
from tests.forms import submit
from tests.gpus.snapshots import sample
from tests.web.conftest import HTMX
from tests.web.watched import POLICY, watched

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]


@pytest.fixture(autouse=True)
def box(db: None) -> Iterator[Host]:
    alerts.forget()
    yield make_host(gpus=8)
    alerts.forget()


def busy(_place: int, _ago_s: int) -> int:
    return 93


def second_idles(place: int, ago_s: int) -> int:
    """The second GPU has done nothing for 41 minutes."""
    return 3 if place == 1 and ago_s <= 41 * 60 else 93


def plain(html: str) -> str:
    """What a page says, without its markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", html))


def page_of(client: Client, run: Run, query: str = "") -> str:
    return client.get(f"/p/main/runs/{run.uid}/{query}").content.decode()


def keep(client: Client, run: Run, reason: str) -> Any:
    return submit(client, f"/p/main/runs/{run.uid}/", {"reason": reason}, to="/keep/")


def chart_of(page: str) -> dict:
    found = re.search(r'<script id="gpu-data" type="application/json">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def test_a_low_gpu_is_shown_with_its_start_and_the_time_of_the_stop(
    project: Project, ann: User, as_user: SignIn
) -> None:
    run = watched(project, ann, "train", 50, second_idles)
    text = plain(page_of(as_user(ann), run))
    assert "Stop the run when a GPU stays below 50 % for 1 h." in text
    assert "GPU 1 below 50 % for 40 min, stops in 19 min" in text or "for 41 min, stops in 19 min" in text
    assert "run file" in text


def test_a_policy_of_a_profile_is_linked_to_it(project: Project, ann: User, as_user: SignIn) -> None:
    profile = Profile.objects.create(project=project, name="frugal", settings={"utilization_policy": POLICY})
    run = watched(project, ann, "train", 5, busy, policy=None, profile="frugal")
    page = page_of(as_user(ann), run)
    assert f'href="/p/main/profiles/#profile-{profile.pk}">profile frugal</a>' in page
    assert "Meets the minimum utilization" in page


def test_the_chart_has_each_gpu_the_minimum_and_the_low_stretch(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 50, second_idles)
    chart = chart_of(page_of(as_user(ann), run))
    assert chart["minimum"] == 50
    assert [gpu["index"] for gpu in chart["gpus"]] == [0, 1]
    assert chart["gpus"][0]["memory_used_mib"][-1] == 20_000
    assert chart["gpus"][0]["utilization"][-1] == 93
    assert chart["gpus"][1]["utilization"][-1] == 3
    assert len(chart["at_ms"]) == len(chart["gpus"][1]["utilization"]) <= 360
    assert 40 * 60_000 < chart["low_until_ms"] - chart["low_since_ms"] <= 41 * 60_000 + 5_000


def test_the_span_of_the_chart_can_be_chosen_and_covers_the_window_by_default(
    project: Project, ann: User, as_user: SignIn
) -> None:
    run = watched(project, ann, "train", 120, busy)
    client = as_user(ann)

    def minutes(query: str) -> int:
        chart = chart_of(page_of(client, run, query))
        return round((chart["until_ms"] - chart["since_ms"]) / 60_000)

    assert minutes("?range=1h") == 60
    assert 'data-poll="15"' in page_of(client, run, "?range=1h")
    assert 'data-poll="30"' in page_of(client, run, "?range=24h")
    assert minutes("?range=24h") == 120  # no longer than it has run
    assert minutes("") == 120  # a window of an hour asks for more than the last hour


def test_the_same_as_a_table(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 5, second_idles)
    page = page_of(as_user(ann), run, "?as=table")
    assert "gpu-data" not in page
    assert page.count("93&nbsp;% ") >= 25
    assert "19.5 GB" in page


def test_each_node_has_its_own_chart_and_the_low_one_is_selected(project: Project, ann: User, as_user: SignIn) -> None:
    make_host("box-2", gpus=8)
    run = watched(project, ann, "train", 5, busy, nodes=2)
    client = as_user(ann)
    assert chart_of(page_of(client, run))["gpus"][0]["uuid"] in placed_job(run, 0).gpus
    assert chart_of(page_of(client, run, "?node=1"))["gpus"][0]["uuid"] in placed_job(run, 1).gpus


def test_a_poll_gets_nothing_until_there_is_a_sample(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 5, busy, silent_s=15)
    client, url = as_user(ann), f"/p/main/runs/{run.uid}/gpus/"
    version = client.get(url, headers=HTMX)["HX-PTag"]
    assert client.get(url, headers={**HTMX, "HX-PTag": version}).status_code == 204
    job = placed_job(run)
    newest = max(job.gpu_series.values_list("last_ms", flat=True))
    intake.add_samples(job, [(newest + 10_000, [sample(uuid, 88) for uuid in job.gpus])])
    answer = client.get(url, headers={**HTMX, "HX-PTag": version})
    assert answer.status_code == 200
    assert "88 %" in answer.content.decode()


def test_the_runs_own_page_names_the_panels_version(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 5, busy, silent_s=15)
    client = as_user(ann)
    version = client.get(f"/p/main/runs/{run.uid}/gpus/", headers=HTMX)["HX-PTag"]
    assert f'hx-ptag="{version}"' in page_of(client, run)


def test_the_address_of_the_panel_redirects_to_the_runs_page(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 5, busy)
    answer = as_user(ann).get(f"/p/main/runs/{run.uid}/gpus/?range=6h")
    assert answer["Location"] == f"/p/main/runs/{run.uid}/?range=6h#run-gpus"


def test_missing_samples_are_unknown_and_stop_no_run(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 70, second_idles, silent_s=120)
    page = page_of(as_user(ann), run)
    assert "Runs are not stopped for missing samples." in page
    assert "stops in" not in plain(page)


def test_a_run_on_cpus_has_no_panel_and_no_chart_scripts(project: Project, ann: User, as_user: SignIn) -> None:
    run = make_run(project, ann)
    place_all()
    page = page_of(as_user(ann), run)
    assert "run-gpus" not in page
    assert "uPlot" not in page


def test_a_waiting_run_gets_its_panel_once_it_is_placed(project: Project, ann: User, as_user: SignIn) -> None:
    run = make_run(project, ann, resources={"gpu": 1}, utilization_policy=POLICY)
    client = as_user(ann)
    assert "run-gpus-place" not in page_of(client, run)
    place_all()
    page = page_of(client, run)
    assert "run-gpus-place" in page
    assert "Checked once its commands run" in page
    assert "Sampling starts with the run's commands" in page


def test_the_owner_keeps_a_run_with_a_reason_that_all_members_see(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    run = watched(project, ann, "train", 50, second_idles)
    answer = keep(as_user(ann), run, "it loads its data")
    assert json.loads(answer["HX-Trigger"])["toast"]["text"] == "train will not be stopped for 30 min"
    page = page_of(as_user(mia), run)
    assert "Kept running until" in page
    assert "by ann: “it loads its data”" in plain(page)
    assert 'action="/p/main/runs/' + str(run.uid) + '/keep/"' not in page  # it is kept already
    assert "Exempt from its policy until" in plain(page)


def test_only_the_owner_and_managers_are_offered_to_keep_it(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    run = watched(project, ann, "train", 50, second_idles)
    bo = join(project, make_user("bo"), "member")
    assert "Keep for 30 min" in page_of(as_user(ann), run)
    assert "3 of 3 left" in page_of(as_user(mia), run)
    assert "Keep for 30 min" not in page_of(as_user(bo), run)
    by_hand = as_user(bo).post(f"/p/main/runs/{run.uid}/keep/", {"reason": "why not"}, headers=HTMX)
    assert by_hand.status_code == 403, "which no page of theirs sends"
    assert not PolicyExemption.objects.exists()


def test_without_a_reason_it_is_not_kept(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 50, second_idles)
    answer = keep(as_user(ann), run, " ")
    assert answer.status_code == 422
    assert not PolicyExemption.objects.exists()


def test_an_observing_project_shows_that_and_offers_no_keep(project: Project, ann: User, as_user: SignIn) -> None:
    ProjectPolicies.objects.create(project=project, observe_only=True)
    run = watched(project, ann, "train", 50, second_idles)
    text = plain(page_of(as_user(ann), run))
    assert "Observe only: policies stop no runs in this project." in text
    assert "stops in" not in text
    assert "Keep for 30 min" not in text


def test_a_host_without_nvml_shows_that_its_gpus_are_not_watched(
    project: Project, ann: User, as_user: SignIn, box: Host
) -> None:
    HostSampling.objects.create(host=box, library=False)
    run = make_run(project, ann, resources={"gpu": 1}, utilization_policy=POLICY)
    place_all()
    assert "box-1 has no NVML library: its GPUs are not sampled, and policies stop no runs there." in page_of(
        as_user(ann), run
    )


def test_unreadable_gpus_are_shown_to_the_runs_that_hold_them(
    project: Project, ann: User, box: Host, as_user: SignIn
) -> None:
    seen, missed = watched(project, ann, "train", 5, busy), watched(project, ann, "other", 5, busy, silent_s=120)
    HostSampling.objects.update_or_create(host=box, defaults={"error": "GPU 3: GPU is lost"})
    said = "Some GPUs of box-1 cannot be read: GPU 3: GPU is lost"
    assert said in plain(page_of(as_user(ann), missed))
    assert "can be read" not in plain(page_of(as_user(ann), seen))


def test_an_ended_run_is_shown_up_to_its_end_and_no_longer_polled(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 50, second_idles)
    job = placed_job(run)
    attempts.end_job(job.pk, "done_by_runner", exit_code=0)
    job.refresh_from_db()
    PolicyStop.objects.create(
        project=project, run=run, run_name=run.name, min_gpu_utilization=50, time_window_s=3600, scope="any",
        low_since=job.started_at, at=job.ended_at,
    )  # fmt: skip
    page = page_of(as_user(ann), run)
    chart = chart_of(page)
    assert 'id="gpus-over" data-poll-over' in page
    assert chart["until_ms"] == round(job.ended_at.timestamp() * 1000)
    assert chart["low_until_ms"] == chart["until_ms"]
    assert "run-policy" not in page


@pytest.mark.parametrize("path", ["runs/", "queue/"])
def test_lists_mark_runs_from_half_the_window_on(project: Project, ann: User, as_user: SignIn, path: str) -> None:
    watched(project, ann, "idler", 50, second_idles)
    watched(project, ann, "worker", 50, busy)
    watched(project, ann, "short", 50, lambda _place, ago_s: 3 if ago_s < 25 * 60 else 93)
    text = plain(as_user(ann).get(f"/p/main/{path}").content.decode())
    assert text.count("below 50 %") == 1
    assert re.search(r"idler ann ?GPU 1 below 50 % for \d+ min, stops in \d+ min", text)


def test_an_open_list_gets_a_mark_that_becomes_due_over_time(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "idler", 50, second_idles, policy={**POLICY, "time_window": "2h"})
    client = as_user(ann)
    version = client.get("/p/main/runs/")["HX-PTag"]
    assert client.get("/p/main/runs/", headers={**HTMX, "HX-PTag": version}).status_code == 204
    JobPolicy.objects.filter(job__run=run).update(time_window_s=3600)
    alerts.forget()  # the few seconds for which nobody looks again
    answer = client.get("/p/main/runs/", headers={**HTMX, "HX-PTag": version})
    assert "below 50 %" in answer.content.decode()


def test_a_notified_owner_sees_the_alert_on_every_page_and_others_do_not(
    project: Project, ann: User, mia: User, as_user: SignIn
) -> None:
    run = watched(project, ann, "idler", 50, second_idles)
    assert "You can keep it running from its page" not in as_user(ann).get("/p/main/hosts/").content.decode()
    low = max(filter(None, placed_job(run).gpu_series.values_list("low_since_ms", flat=True)))
    JobPolicy.objects.filter(job__run=run).update(noticed_ms=low)
    page = as_user(ann).get("/p/main/hosts/").content.decode()
    assert re.search(
        r"idler: GPU 1 below 50 % for \d+ min, stops in \d+ min ?You can keep it running from its page", plain(page)
    )
    assert "You can keep it running from its page" not in as_user(mia).get("/p/main/hosts/").content.decode()
    own = page_of(as_user(ann), run)
    assert "You can keep it running from its page" not in own
    assert 'role="alert"' in own


def test_a_notice_appears_on_every_page_of_its_owner(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "idler", 58, lambda place, ago_s: 3 if place == 1 and ago_s <= 54 * 60 else 93)
    client = as_user(ann)
    first = {path: client.get(f"/p/main/{path}") for path in ("runs/", "queue/")}
    event = re.search(r'data-event="(\d+)"', first["queue/"].content.decode())
    assert event
    assert apply_policy(placed_job(run), timezone.now()) == PolicyAction.NOTICE
    for path, shown in first.items():
        headers = {**HTMX, "HX-PTag": shown["HX-PTag"], "DW-Announced": event[1]}
        poll = client.get(f"/p/main/{path}", headers=headers).content.decode()
        assert 'id="idle-gpus" hx-swap-oob' in poll
        assert re.search(r"idler: GPU 1 below 50 % for 5\d min, stops in", plain(poll)), path
    assert re.search(r'id="announcements".*idler: GPU 1 has been below 50 % since', poll, re.S)
    assert "has been below 50 % since" in plain(page_of(client, run))  # its timeline


def test_an_owner_who_is_only_notified_sees_the_alert_after_the_window(
    project: Project, ann: User, as_user: SignIn
) -> None:
    run = watched(project, ann, "idler", 50, second_idles, policy={**POLICY, "time_window": "30m", "action": "notify"})
    assert apply_policy(placed_job(run), timezone.now()) == PolicyAction.WOULD_STOP
    page = plain(as_user(ann).get("/p/main/hosts/").content.decode())
    assert re.search(r"idler: GPU 1 below 50 % for \d+ min", page)
    assert "You can keep it running from its page" not in page
    assert "Policy alert: GPUs underutilized" in plain(page_of(as_user(ann), run))


def test_a_throttled_gpu_shows_the_reason_and_links_to_its_page(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 5, busy, gpus=1)
    job = placed_job(run)
    job.gpu_series.update(throttle=0x20)
    page = page_of(as_user(ann), run)
    assert "slowed down by heat" in page
    assert f'href="/p/main/gpus/{job.gpus[0]}/"' in page


def test_a_run_that_is_ending_is_not_judged(project: Project, ann: User, as_user: SignIn) -> None:
    run = watched(project, ann, "train", 50, second_idles)
    services.stop(run, ann, "member")
    text = plain(page_of(as_user(ann), run))
    assert "The run is ending and no longer checked" in text
    assert "Keep for 30 min" not in text


def test_eight_gpus_and_a_long_run_cost_a_page_of_bounded_size(
    project: Project, ann: User, as_user: SignIn, django_assert_max_num_queries: Callable
) -> None:
    run = watched(project, ann, "big", 120, busy, gpus=8)
    client, url = as_user(ann), f"/p/main/runs/{run.uid}/gpus/?range=24h"
    with django_assert_max_num_queries(26):
        answer = client.get(url, headers=HTMX)
    assert len(answer.content) < 100_000
    assert Job.objects.count() == 1
