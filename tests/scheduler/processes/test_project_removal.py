"""A project is deleted in small steps, with all it has; what is active keeps it."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoCaptureOnCommitCallbacks

from dstackweb.accounts import services as accounts
from dstackweb.accounts.access import project_for, role_in, visible_projects
from dstackweb.accounts.models import Project, User
from dstackweb.audit.models import AuditEntry
from dstackweb.lib.errors import Conflict, NotFound
from dstackweb.lib.storage import storage
from dstackweb.progress import finalize
from dstackweb.progress.models import Scope
from dstackweb.runs import archives, artifacts, logs, recurrence, services
from dstackweb.runs.models import Archive, Queue, RemovedRun, Run
from dstackweb.runs.recount import differences
from dstackweb.scheduler.processes import project_removal, retention
from tests.factories import join, make_host, make_project, make_run, make_user
from tests.forms import submit
from tests.runs.test_removal import done_run

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]


@pytest.fixture
def old() -> Project:
    """A project with an ended run, its log, artifact and code, a queue of its own, a secret and a schedule."""
    project = make_project("old")
    ann = join(project, make_user("ann"), "admin")
    make_host()
    archive, _new = archives.store_archive(project, [b"code"])
    run = done_run(project, ann)
    Run.objects.filter(pk=run.pk).update(archive=archive, retry_at=timezone.now())
    job = run.jobs.get()
    sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert artifacts.take(job.pk, artifacts.Offered("a.txt", 5, sha256), 0, b"hello").done
    Queue.objects.create(project=project, name="night")
    accounts.set_secret(project, "TOKEN", "9f3-77c-x81-q20", by=ann)
    return project


def test_a_project_goes_with_its_files_and_leaves_no_row(
    old: Project, project: Project, member: User, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    other = make_run(project, member)
    log = logs.log_key(old.runs.get().jobs.get().pk)
    keys = [Archive.objects.get().key, log, artifacts.of_run(old.runs.get()).get().key]
    assert all(storage().size(key) for key in keys)
    with django_capture_on_commit_callbacks(execute=True):
        project_removal.begin(old, timezone.now())
        for _tick in range(9):
            retention.prune(budget_s=None)
    assert project_removal.waiting(9) == 0
    assert not any(storage().size(key) for key in keys)
    assert not Project.objects.filter(name="old").exists()
    for model in apps.get_models():
        for field in model._meta.concrete_fields:
            if field.related_model is Project:
                assert not model._base_manager.filter(**{field.attname: old.pk}).exists(), model
    assert not RemovedRun.objects.filter(has_logs=True).exists()
    assert list(Run.objects.all()) == [other]
    assert list(differences()) == []
    assert AuditEntry.objects.filter(kind="project", name="old", action="deleted").exists()


def test_a_deleted_project_is_shown_to_nobody_and_its_schedules_end(old: Project) -> None:
    ann, root = User.objects.get(username="ann"), User.objects.create_superuser("root")
    project_removal.begin(old, timezone.now())
    for user in (ann, root):
        assert old not in visible_projects(user)
        assert role_in(old, user) is None
        with pytest.raises(NotFound):
            project_for(user, "old")
    assert recurrence.create_occurrences(timezone.now()) == 0
    with pytest.raises(Conflict, match="draining"):
        make_run(old, ann)


def test_a_project_with_active_runs_stays_and_says_what_is_active(project: Project, member: User) -> None:
    run = make_run(project, member)
    with pytest.raises(Conflict, match="project main still has: 1 active run"):
        project_removal.begin(project, timezone.now())
    assert Project.objects.get(name="main").deleting_since is None
    services.stop(run, member, "member")
    project_removal.begin(project, timezone.now())


def test_an_interrupted_removal_goes_on(old: Project) -> None:
    project_removal.begin(old, timezone.now())
    scope = Scope.objects.create(project=old, run_id=7, attempt=1)
    steps = 0
    while project_removal.waiting(9) and steps < 99:
        steps += 1
        project_removal.step(timezone.now())
        finalize.settle(scope.pk)
        finalize.prune(1 << 50)
    assert 5 < steps < 99


def test_the_admin_says_how_much_goes_and_deletes_after_a_yes(old: Project, admin_client: Client) -> None:
    address = f"/admin/accounts/project/{old.pk}/delete/"
    served = admin_client.get(address)
    page = served.text
    for text in ("Runs, with their jobs and events", "Archives of code", "Artifacts", "Secrets"):
        assert text in page
    assert "train-a" not in page, "no names of rows"
    done = submit(admin_client, served, having="post", follow=True)
    assert "Deleting old." in done.text
    assert Project.objects.get(name="old").deleting_since is not None
    assert admin_client.get(address).status_code == 403
    changed = AuditEntry.objects.get(kind="project", name="old", action="changed")
    assert changed.actor_name == "admin"


def test_the_admin_refuses_to_delete_a_project_with_active_runs(
    project: Project, member: User, admin_client: Client
) -> None:
    make_run(project, member)
    address = f"/admin/accounts/project/{project.pk}/delete/"
    assert "main still has: 1 active run" in admin_client.get(address).text
    by_hand = admin_client.post(address, {"post": "yes"}, follow=True)  # the page has no such button
    assert "Nothing was deleted" in by_hand.text


def test_staff_delete_no_project(project: Project, client: Client) -> None:
    """Nor by a request that no page of theirs sends."""
    staff = make_user("staff", is_staff=True)
    staff.user_permissions.set(apps.get_model("auth", "Permission").objects.filter(codename__endswith="_project"))
    client.force_login(staff)
    assert client.post(f"/admin/accounts/project/{project.pk}/delete/", {"post": "yes"}).status_code == 403
    assert Project.objects.filter(pk=project.pk, deleting_since=None).exists()
