from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from dstackweb.accounts.models import Project
from dstackweb.progress import counters, finalize
from dstackweb.progress.ingest import ingest_batch
from dstackweb.progress.reports import Batch, Event
from dstackweb.progress.states import TaskState

pytestmark = pytest.mark.django_db


def test_the_admin_shows_reporters_with_their_run_and_whether_it_is_settled(
    project: Project, admin_client: Client
) -> None:
    scope_id = counters.ensure_scope(project.pk, 4711, 1)
    ingest_batch(scope_id, Batch("log-0", (Event("load-1", TaskState.QUEUED, 1, "load", "load"),)), 1_800_000_000_000)
    finalize.end([(4711, 1)], 1_800_000_060_000)
    scopes = admin_client.get(reverse("admin:progress_scope_changelist"), {"q": "4711"}).content.decode()
    assert "4711" in scopes
    assert "2027" in scopes
    reporters = admin_client.get(reverse("admin:progress_reporter_changelist"), {"q": "log"}).content.decode()
    assert "main 4711/1" in reporters


def test_nothing_that_is_counted_can_be_written_in_the_admin(project: Project, admin_client: Client) -> None:
    """Its pages only show it, and what they don't send is refused."""
    scope_id = counters.ensure_scope(project.pk)
    assert admin_client.get(reverse("admin:progress_scope_add")).status_code == 403
    assert admin_client.post(reverse("admin:progress_scope_change", args=[scope_id]), {"total": 5}).status_code == 403
    assert admin_client.get(reverse("admin:progress_scope_change", args=[scope_id])).status_code == 200
