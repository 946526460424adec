"""Backends and hosts in the admin."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from dstackweb.backends.hosts.inventory import ensure_embedded_backend
from dstackweb.backends.models import Backend, Gpu, Host, HostEvent
from tests import factories
from tests.forms import open_form, submit

pytestmark = pytest.mark.django_db


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(factories.make_user(is_staff=True, is_superuser=True))
    return client


def test_every_list_and_page_opens_and_can_be_searched(admin: Client) -> None:
    host = factories.make_host(gpus=2)
    event = HostEvent.objects.create(host=host, kind="online")
    for row in (host.backend, host, host.gpus.first(), event):
        assert row is not None
        name = row._meta.model_name
        assert admin.get(reverse(f"admin:backends_{name}_changelist"), {"q": "a"}).status_code == 200
        assert admin.get(reverse(f"admin:backends_{name}_change", args=[row.pk])).status_code == 200


def test_a_change_of_a_backend_raises_its_version(admin: Client) -> None:
    backend = ensure_embedded_backend()
    page = reverse("admin:backends_backend_change", args=[backend.pk])
    submit(admin, page)
    assert Backend.objects.get().version == 1
    submit(admin, page, {"enabled": False})
    assert (Backend.objects.get().version, Backend.objects.get().enabled) == (2, False)


@pytest.mark.parametrize("labels", ["[1]", '{"region": 3}', '{"a b": "c"}', '{"region": ""}'])
def test_labels_must_be_texts_by_name(admin: Client, labels: str) -> None:
    host = factories.make_host()
    answer = submit(admin, reverse("admin:backends_host_change", args=[host.pk]), {"labels": labels})
    assert "Use an object of strings" in answer.content.decode()


def test_the_setup_snippet_is_kept_with_plain_line_ends(admin: Client) -> None:
    host = factories.make_host()
    page = reverse("admin:backends_host_change", args=[host.pk])
    submit(admin, page, {"labels": '{"region": "cellar"}', "setup": "module load cuda\nexport A=1\n"})
    host.refresh_from_db()
    assert host.setup.splitlines() == ["module load cuda", "export A=1"]
    assert "\r" not in host.setup
    assert host.labels == {"region": "cellar"}


def test_values_reported_by_the_machine_are_read_only(admin: Client) -> None:
    host = factories.make_host(cpus=8)
    page = reverse("admin:backends_host_change", args=[host.pk])
    forged = {"labels": "{}", "cpus": "64", "isolation": "user", "name": "other"}
    admin.post(page, {**open_form(admin, page).values, **forged})
    host.refresh_from_db()
    assert (host.cpus, host.isolation, host.name) == (8, "shared", "box-1")
    assert admin.get(reverse("admin:backends_host_add")).status_code == 403
    assert admin.get(reverse("admin:backends_gpu_add")).status_code == 403


def test_hosts_are_drained_and_opened_again_from_the_list(admin: Client) -> None:
    first, second = factories.make_host("one"), factories.make_host("two")
    page = reverse("admin:backends_host_changelist")
    submit(admin, page, {"action": "drain", "_selected_action": [first.pk]})
    assert set(Host.objects.filter(draining=True)) == {first}
    submit(admin, page, {"action": "undrain", "_selected_action": [first.pk, second.pk]})
    assert not Host.objects.filter(draining=True).exists()


def test_a_host_is_deleted_with_its_gpus_unless_it_has_jobs(admin: Client) -> None:
    gone, busy = factories.make_host("gone", gpus=1, draining=True), factories.make_host("busy", gpus=1)
    factories.make_run(factories.make_project(), factories.make_user())
    factories.place_all()
    submit(admin, reverse("admin:backends_host_delete", args=[gone.pk]), having="post")
    admin.post(reverse("admin:backends_host_delete", args=[busy.pk]), {"post": "yes"})  # its page has no such button
    assert set(Host.objects.all()) == {busy}
    assert {gpu.host for gpu in Gpu.objects.all()} == {busy}


def test_a_changed_host_is_recorded_as_events_and_other_columns_stay(admin: Client) -> None:
    host = factories.make_host(labels={"region": "eu"})
    Host.objects.update(leaving=True, draining=True)
    page = reverse("admin:backends_host_change", args=[host.pk])
    submit(admin, page, {"labels": '{"disk": "nvme"}', "setup": "module load cuda", "draining": False})
    host.refresh_from_db()
    assert (host.labels, host.setup, host.draining, host.leaving) == (
        {"disk": "nvme"},
        "module load cuda",
        False,
        False,
    )
    found = dict(HostEvent.objects.values_list("kind", "data"))
    assert found == {"labelled": {"set": {"disk": "nvme"}, "removed": ["region"]}, "undrained": {}}


def test_a_gpu_is_written_in_capitals(admin: Client) -> None:
    assert "GPUs" in admin.get(reverse("admin:index")).content.decode()
