from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from dstackweb.accounts.models import Project, User
from dstackweb.runs import admin, selectors, services
from dstackweb.runs.models import Queue
from tests.factories import make_host, make_run, place_all

pytestmark = pytest.mark.django_db


def test_a_queue_that_is_paused_in_the_admin_shows_as_paused_in_every_open_list(
    project: Project, admin_client: Client
) -> None:
    queue = services.ensure_queue(project)
    shown = selectors.list_version(project)
    address = reverse("admin:runs_queue_change", args=[queue.pk])
    assert admin_client.post(address, {"paused": "on"}).status_code == 302
    queue.refresh_from_db()
    assert queue.paused
    assert selectors.list_version(project) != shown


def test_saving_a_queue_in_the_admin_writes_what_was_changed_and_nothing_older(
    project: Project, member: User, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is submitted while the form is saved keeps its place before the next one."""
    queue = services.ensure_queue(project)
    save = admin.QueueAdmin.save_model

    def while_saving(self: admin.QueueAdmin, *args: object, **kwargs: object) -> None:
        make_run(project, member)
        save(self, *args, **kwargs)

    monkeypatch.setattr(admin.QueueAdmin, "save_model", while_saving)
    admin_client.post(reverse("admin:runs_queue_change", args=[queue.pk]), {"paused": "on"})
    assert Queue.objects.get(pk=queue.pk).last_seniority_us > queue.last_seniority_us
    make_host()
    assert place_all() == 0
