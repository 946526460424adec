"""The page of utilization policies: the ledger, what-if, and the switch."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.exemptions import policies_of
from dstackweb.gpus.models import PolicyStop
from dstackweb.profiles.models import Profile
from dstackweb.runs import services
from tests.factories import join, make_project, make_run, make_user
from tests.forms import submit
from tests.gpus.past import past_run

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]
ASKED = {"min_gpu_utilization": "10", "time_window": "10m", "scope": "any", "warmup": ""}


def page(client: Client, **query: Any) -> str:
    answer = client.get("/p/main/utilization/", query)
    assert answer.status_code == 200
    return " ".join(answer.content.decode().split())


def add_stop(project: Project, name: str, **fields: Any) -> PolicyStop:
    now = timezone.now()
    values = {
        "at": now - dt.timedelta(hours=2), "min_gpu_utilization": 10, "time_window_s": 1800, "scope": "any",
        "low_since": now - dt.timedelta(hours=3), "gpu_index": 1, "gpus": ["GPU-a", "GPU-b"],
    }  # fmt: skip
    return PolicyStop.objects.create(project=project, run_name=name, **{**values, **fields})


def test_without_a_stop_the_page_explains_how_to_set_a_policy(project: Project, ann: User, as_user: SignIn) -> None:
    shown = page(as_user(ann))
    assert "No runs stopped by a policy" in shown
    assert "Enforced" in shown
    assert "A run can be kept running 3 times, for 30 min each." in shown
    assert "/admin/" not in shown
    assert 'href="/p/main/utilization/" aria-current="page"' in shown


def test_a_default_profile_that_no_run_can_use_hides_no_ledger(project: Project, ann: User, as_user: SignIn) -> None:
    Profile.objects.filter(is_default=True).update(settings={"utilization_policy": {"time_window": "soon"}})
    shown = page(as_user(ann))
    assert "No runs stopped by a policy" in shown
    assert 'value="30m"' in shown


def test_the_form_suggests_the_default_profiles_policy(project: Project, ann: User, as_user: SignIn) -> None:
    settings = "utilization_policy: {min_gpu_utilization: 35, time_window: 2h, scope: all}"
    Profile.objects.filter(is_default=True).update(settings=settings)
    shown = page(as_user(ann))
    assert 'value="35"' in shown
    assert 'value="2h"' in shown
    assert '<option value="all" selected>' in shown


def test_a_policy_is_tried_on_real_samples(project: Project, ann: User, as_user: SignIn) -> None:
    past_run(project, ann, "idle", [[0] * 180])
    past_run(project, ann, "busy", [[90] * 180])
    shown = page(as_user(ann), **ASKED)
    assert "Would have stopped 1 of 2 runs and saved 0.3 of 1.0 GPU-hours." in shown
    assert "Evaluated 360 samples of 2 GPUs" in shown
    assert ">idle</a>" in shown
    assert ">busy</a>" not in shown
    assert "GPU 0" in shown


def test_a_policy_that_stops_no_run_and_one_without_runs_have_different_messages(
    project: Project, ann: User, as_user: SignIn
) -> None:
    client = as_user(ann)
    assert "No GPU samples of runs in this time" in page(client, **ASKED)
    past_run(project, ann, "busy", [[90] * 180])
    assert "Would not have stopped the one run with GPUs." in page(client, **ASKED)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"min_gpu_utilization": "101"}, "min_gpu_utilization"),
        ({"time_window": "30s"}, "time_window"),
        ({"warmup": "soon"}, "warmup"),
    ],
)
def test_errors_are_shown_at_their_fields(
    project: Project, ann: User, as_user: SignIn, wrong: dict[str, str], field: str
) -> None:
    answer = as_user(ann).get("/p/main/utilization/", {**ASKED, **wrong})
    assert answer.status_code == 422
    assert f'id="id_{field}_error"' in answer.content.decode()


def test_the_ledger_shows_stopped_runs_and_the_run_that_got_their_gpus_next(
    project: Project, ann: User, as_user: SignIn
) -> None:
    following = make_run(project, ann, "train-7")
    add_stop(
        project, "idle", run=make_run(project, ann, "idle"), user=ann, until=timezone.now(), price=1,
        next_run=following, next_at=timezone.now(),
    )  # fmt: skip
    add_stop(project, "forever", user=ann)
    add_stop(project, "seen", user=ann, observed=True, gpu_index=None, scope="all")
    shown = page(as_user(ann))
    assert "GPU 1 was below 10 % for 30 min" in shown
    assert ">train-7</a>" in shown
    assert "excludes 1 run without max_duration" in shown
    assert "observed" in shown
    assert '<div class="kpi">4.0</div>' in shown
    assert '<div class="kpi">$2.00</div>' in shown


def test_another_projects_run_is_not_named(project: Project, ann: User, as_user: SignIn) -> None:
    other = make_project("other")
    services.ensure_queue(other)
    theirs = make_run(other, join(other, make_user("bob")), "secret-plan")
    add_stop(project, "idle", user=ann, next_run=theirs, next_at=timezone.now())
    shown = page(as_user(ann))
    assert "a run of another project" in shown
    assert "secret-plan" not in shown


def test_managers_switch_and_members_do_not(project: Project, ann: User, mia: User, as_user: SignIn) -> None:
    assert "/p/main/utilization/observe/" not in page(as_user(ann))
    by_hand = as_user(ann).post("/p/main/utilization/observe/", {"observe_only": "yes"})
    assert by_hand.status_code == 403, "which no page of a member sends"
    client = as_user(mia)
    answer = submit(client, "/p/main/utilization/", to="/observe/", button="Observe only")
    assert (answer.status_code, answer["Location"]) == (302, "/p/main/utilization/")
    assert policies_of(project).observe_only is True
    submit(client, "/p/main/utilization/", to="/observe/", button="Enforce")
    assert policies_of(project).observe_only is False
