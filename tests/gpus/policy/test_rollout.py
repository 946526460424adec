"""A profile's changed policy reaches runs that were submitted before, where an admin says so, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from django.test import Client
from django.urls import reverse

from dstackweb.accounts.models import Project, User
from dstackweb.gpus import rollout
from dstackweb.gpus.models import GpuSeries, JobPolicy
from dstackweb.gpus.window import PolicyAction
from dstackweb.lib.errors import Conflict
from dstackweb.lib.times import to_moment
from dstackweb.profiles.models import Profile
from dstackweb.runs import services
from dstackweb.runs.models import Run
from dstackweb.runs.sweeps import creation, services as sweeps
from dstackweb.wording.events import event_text
from tests import factories
from tests.factories import join, make_project, make_user, place_all
from tests.forms import open_form, submit
from tests.gpus.snapshots import EVERY_MS, START_MS
from tests.gpus.watching import MINUTE, begin, watch

pytestmark = pytest.mark.django_db

SLOW = {"min_gpu_utilization": 20, "time_window": "1h"}
STRICT = {"min_gpu_utilization": 50, "time_window": "2m"}
NOW = to_moment(START_MS + 5 * MINUTE)


def make_run(project: Project, user: User, name: str | None = None, **keys: Any) -> Run:
    """A run with a GPU: a policy says nothing of others."""
    return factories.make_run(project, user, name, **{"resources": {"gpu": 1}, **keys})


def save(profile: Profile, policy: dict[str, Any] | None) -> Profile:
    profile.settings = {"utilization_policy": policy} if policy else {}
    profile.save()
    return profile


def nightly(policy: dict[str, Any] | None = SLOW, **fields: Any) -> Profile:
    return save(Profile(name="nightly", **fields), policy)


def names(profile: Profile) -> set[str]:
    return {change.run.name for change in rollout.changes(profile, NOW).listed}


def apply_all(profile: Profile, actor: User) -> int:
    found = rollout.changes(profile, NOW)
    return rollout.apply(profile, [change.run.pk for change in found.listed], found.fingerprint, actor)


def test_runs_that_have_it_from_the_profile_would_change_and_those_with_their_own_would_not(
    project: Project, member: User
) -> None:
    profile = nightly()
    for name, keys in {
        "from-it": {"profile": "nightly"},
        "own": {"profile": "nightly", "utilization_policy": STRICT},
        "other": {},
    }.items():
        make_run(project, member, name, **keys)
    ended = make_run(project, member, "ended", profile="nightly")
    services.stop(ended, member, "member")
    assert names(profile) == set()
    assert names(save(profile, STRICT)) == {"from-it"}


def test_a_default_that_gets_a_policy_reaches_the_runs_that_had_none(project: Project, member: User) -> None:
    default = Profile.objects.get(is_default=True)
    make_run(project, member, "plain")
    make_run(make_project("elsewhere"), join(project, make_user("bob")), "there", role="admin")
    assert names(save(default, STRICT)) == {"plain", "there"}


def test_runs_of_when_there_was_no_default_are_the_defaults(project: Project, member: User) -> None:
    Profile.objects.all().delete()
    make_run(project, member, "plain")
    assert names(nightly(STRICT)) == set()
    Profile.objects.all().delete()
    assert names(nightly(STRICT, is_default=True)) == {"plain"}


def test_a_projects_own_profile_hides_that_of_all(project: Project, member: User) -> None:
    everybody, own = nightly(), nightly(project=project)
    make_run(project, member, "run", profile="nightly")
    assert names(save(everybody, STRICT)) == set()
    assert names(save(own, STRICT)) == {"run"}


def test_applied_it_is_the_runs_with_its_source_and_an_event(project: Project, member: User) -> None:
    profile = nightly(None)
    run = make_run(project, member, "run", profile="nightly")
    save(profile, STRICT)
    assert apply_all(profile, member) == 1
    run.refresh_from_db()
    assert run.spec["utilization_policy"]["min_gpu_utilization"] == 50
    assert run.provenance["utilization_policy"] == {"source": "profile", "profile": "nightly"}
    event = run.events.get(kind="utilization_policy_changed")
    assert event.actor == member
    assert event_text(event, 1) == (
        "its utilization policy changed: Stop the run when a GPU stays below 50 % for 2 min."
    )
    assert names(profile) == set()
    assert apply_all(profile, member) == 0
    save(profile, None)
    assert apply_all(profile, member) == 1
    run.refresh_from_db()
    assert (run.spec["utilization_policy"], run.provenance["utilization_policy"]) == (None, {"source": "default"})
    assert event_text(run.events.last(), 1) == "its utilization policy was removed"


def test_runs_that_a_sweep_is_still_to_create_get_it_with_those_that_wait(project: Project, member: User) -> None:
    profile = nightly()
    array = {"count": 3, "max_parallel": 1}
    config = {"type": "task", "name": "lr", "commands": ["true"], "resources": {"gpu": 1}, "profile": "nightly"}
    sweeps.submit(project, member, "member", services.Submission(config | {"array": array}))
    assert apply_all(save(profile, STRICT), member) == 1
    services.stop(Run.objects.get(), member, "member")
    creation.settle(NOW)
    following = Run.objects.get(name="lr-1")
    assert following.spec["utilization_policy"]["min_gpu_utilization"] == 50
    assert following.provenance["utilization_policy"] == {"source": "profile", "profile": "nightly"}
    assert names(profile) == set()


def test_a_hold_is_only_notified_by_the_new_policy_too(project: Project, member: User) -> None:
    profile = nightly()
    config = {"type": "task", "name": "h", "commands": ["true"], "profile": "nightly", "resources": {"gpu": 1}}
    run, _made = services.submit(project, member, "member", services.Submission(config, hold=True))
    assert names(profile) == set()
    assert apply_all(save(profile, STRICT), member) == 1
    run.refresh_from_db()
    assert run.spec["utilization_policy"]["action"] == "notify"
    assert run.provenance["utilization_policy"]["notifies"] is True


def test_a_running_job_is_judged_by_it_from_its_stored_samples_at_once(project: Project, member: User) -> None:
    profile = nightly()
    job = begin(project, member, profile="nightly")
    assert watch(5 * MINUTE, lambda uuid, ms: 30) == []
    assert GpuSeries.objects.get(job=job).low_since_ms is None
    save(profile, STRICT)
    (change,) = rollout.changes(profile, NOW).listed
    assert change.stops_at == NOW
    assert apply_all(profile, member) == 1
    assert GpuSeries.objects.get(job=job).low_since_ms == START_MS
    bound = JobPolicy.objects.get(pk=job.pk)
    assert (bound.min_gpu_utilization, bound.time_window_s) == (50, 120)
    assert watch(5 * MINUTE + EVERY_MS, lambda uuid, ms: 30, from_ms=5 * MINUTE + EVERY_MS)[0][1] == PolicyAction.STOP


def test_a_job_that_was_not_sampled_yet_is_bound_to_the_new_policy(project: Project, member: User) -> None:
    """Whoever binds it at this moment, by what it read before, finds the row and leaves it."""
    profile = nightly()
    job = begin(project, member, profile="nightly")
    apply_all(save(profile, STRICT), member)
    assert JobPolicy.objects.get(pk=job.pk).min_gpu_utilization == 50


def test_a_profile_that_has_changed_since_it_was_shown_is_not_applied(project: Project, member: User) -> None:
    profile = nightly()
    run = make_run(project, member, "run", profile="nightly")
    shown = rollout.changes(save(profile, STRICT), NOW).fingerprint
    save(profile, {**STRICT, "min_gpu_utilization": 99})
    with pytest.raises(Conflict, match="review the list again"):
        rollout.apply(profile, [run.pk], shown, member)
    run.refresh_from_db()
    assert run.spec["utilization_policy"]["min_gpu_utilization"] == 20


def test_only_chosen_runs_of_the_profile_change(project: Project, member: User) -> None:
    profile = nightly()
    first, second = (make_run(project, member, name, profile="nightly") for name in ("first", "second"))
    beside = make_run(project, member, "beside")
    save(profile, STRICT)
    fingerprint = rollout.changes(profile, NOW).fingerprint
    assert rollout.apply(profile, [first.pk, beside.pk], fingerprint, member) == 1
    second.refresh_from_db()
    assert second.spec["utilization_policy"]["min_gpu_utilization"] == 20


# -- in the admin -------------------------------------------------------------------------------------------------


def text_of(policy: dict[str, Any]) -> str:
    return yaml.safe_dump({"utilization_policy": policy})


def test_saving_a_changed_policy_lists_the_affected_runs_and_a_button_applies_it(
    admin_client: Client, project: Project, member: User
) -> None:
    profile = nightly()
    run = make_run(project, member, "train-llama", profile="nightly")
    factories.make_run(project, member, "without-gpus", profile="nightly")
    own = make_run(project, member, "own-policy", profile="nightly", utilization_policy=SLOW)
    url = reverse("admin:profiles_profile_change", args=[profile.pk])
    response = submit(admin_client, f"{url}?as=yaml", {"settings": text_of(STRICT)})
    apply_url = reverse("admin:profiles_profile_apply", args=[profile.pk])
    assert response["Location"] == apply_url
    served = admin_client.get(apply_url)
    page = served.content.decode()
    assert "main/train-llama" in page
    assert "own-policy" not in page
    assert "without-gpus" not in page
    form = open_form(admin_client, served)
    assert form.values["run"] == [str(run.pk)]
    assert "below 20 % for 1 h" in page
    assert "below 50 % for 2 min" in page
    assert "Select at least one run" in form.send({"run": []}, follow=True).content.decode()
    forged = {**form.values, "run": [run.pk, own.pk]}
    done = admin_client.post(apply_url, forged, follow=True).content.decode()
    assert "Policy applied to 1 run." in done
    assert Run.objects.get(pk=run.pk).spec["utilization_policy"]["min_gpu_utilization"] == 50
    assert Run.objects.get(pk=own.pk).spec["utilization_policy"]["min_gpu_utilization"] == 20
    assert "No active run would change" in admin_client.get(apply_url).content.decode()
    assert f'<a href="{apply_url}">Apply policy to active runs</a>' in admin_client.get(url).content.decode()


def test_saving_other_settings_redirects_to_the_list_of_profiles(
    admin_client: Client, project: Project, member: User
) -> None:
    profile = nightly()
    make_run(project, member, profile="nightly")
    url = reverse("admin:profiles_profile_change", args=[profile.pk]) + "?as=yaml"
    saved = submit(admin_client, url, {"description": "words", "settings": text_of(SLOW)})
    assert saved["Location"] == reverse("admin:profiles_profile_changelist")
    strict = {"settings": text_of(STRICT)}
    page = submit(admin_client, url, strict, button="_continue", follow=True).content.decode()
    assert "1 active run still has the previous policy." in page


def test_applying_a_policy_requires_permission_to_change_profiles(client: Client) -> None:
    profile = nightly()
    client.force_login(make_user("clerk", is_staff=True))
    assert client.get(reverse("admin:profiles_profile_apply", args=[profile.pk])).status_code == 403


def test_how_a_project_carries_policies_out_is_set_in_the_admin(admin_client: Client, project: Project) -> None:
    fields = {"project": project.pk, "observe_only": True, "max_exemptions": 5, "exemption_minutes": 45}
    assert submit(admin_client, reverse("admin:gpus_projectpolicies_add"), fields).status_code == 302
    assert (project.policies.observe_only, project.policies.max_exemptions, project.policies.exemption_minutes) == (
        True,
        5,
        45,
    )
    page = admin_client.get(reverse("admin:gpus_projectpolicies_changelist"), {"q": "main"}).content.decode()
    assert "45" in page


def test_a_waiting_run_starts_with_the_policy_it_was_given(project: Project, member: User) -> None:
    profile = nightly(None)
    job = begin(project, member, "holder", gpus=4)
    waiting = make_run(project, member, "waits", resources={"gpu": 1}, profile="nightly")
    place_all()
    apply_all(save(profile, STRICT), member)
    waiting.refresh_from_db()
    assert (job.run.name, waiting.status, waiting.spec["utilization_policy"]["time_window_s"]) == (
        "holder", "submitted", 120,
    )  # fmt: skip
