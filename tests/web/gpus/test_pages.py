"""The GPUs page, the page of one GPU and that of one host: what each GPU does, and who has it."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu, Host, HostEvent
from dstackweb.gpus import intake
from dstackweb.lib.times import to_ms
from dstackweb.runner.nvml import Snapshot
from dstackweb.runs.models import Job, Run
from dstackweb.web.gpus import views as gpu_map_views
from tests.factories import cloud_job, join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.forms import submit
from tests.gpus.past import add_samples
from tests.gpus.snapshots import sample
from tests.web.conftest import HTMX

pytestmark = pytest.mark.django_db
SignIn = Callable[[User], Client]


@pytest.fixture
def client(ann: User, as_user: SignIn) -> Client:
    return as_user(ann)


def page(client: Client, path: str = "gpus/") -> str:
    answer = client.get(f"/p/main/{path}")
    assert answer.status_code == 200, answer.content.decode()[:500]
    return answer.content.decode()


def running(project: Project, user: User, name: str, gpus: int = 1) -> Job:
    run = make_run(project, user, name, resources={"gpu": gpus})
    place_all()
    job = start(placed_job(run))
    Job.objects.filter(pk=job.pk).update(started_at=timezone.now() - dt.timedelta(minutes=10))
    return Job.objects.get(pk=job.pk)


def seen(host: Host, ago_s: int = 0, **readings: Any) -> None:
    """A look at the host's GPUs; `g0=50`, or with all that there is to say."""
    every = []
    for name, shown in readings.items():
        more = shown if isinstance(shown, dict) else {"utilization": shown}
        every.append(sample(f"GPU-{host.name}-{name[1:]}", **more))
    intake.add_snapshot(host, Snapshot(tuple(every), took_ms=2.5), to_ms(timezone.now()) - ago_s * 1000)


def order(text: str) -> list[str]:
    return re.findall(r'id="(?:heat|gpu-row)-([\w-]+)"', text)


def cell(text: str, uuid: str) -> str:
    found = re.search(rf'<a class="([^"]*)" id="heat-{uuid}".*?</a>', text, re.DOTALL)
    assert found
    return found[0]


def test_every_gpu_of_every_host_shows_its_utilization_and_its_run(project: Project, ann: User, client: Client) -> None:
    host = make_host("box-1", gpus=3)
    held = running(project, ann, "train").gpus[0]
    make_host("box-2", gpus=1)
    seen(host, g0=93, g1=0, g2=None)
    Gpu.objects.filter(uuid="GPU-box-1-1").update(stranger={"user": "carl", "pid": 4711})
    text = page(client)
    assert order(text) == ["GPU-box-1-0", "GPU-box-1-1", "GPU-box-1-2", "GPU-box-2-0"]
    assert held == "GPU-box-1-0"
    assert "heat-9" in cell(text, held)
    assert "<b>93 %</b>" in cell(text, held)
    assert "train" in cell(text, held)
    assert "used outside dstackweb" in cell(text, "GPU-box-1-1")
    for unknown in ("GPU-box-1-2", "GPU-box-2-0"):  # what wasn't seen is not zero
        assert "heat-none" in cell(text, unknown)
        assert "<b>–</b>" in cell(text, unknown)
    assert "carl, pid 4711" in page(client, "gpus/?as=table")


def test_an_old_sample_is_not_shown_as_current(project: Project, client: Client) -> None:
    host = make_host("box-1", gpus=1)
    seen(host, ago_s=300, g0=93)
    assert "heat-none" in cell(page(client), "GPU-box-1-0")
    assert "no newer sample" in page(client, "gpus/GPU-box-1-0/")


def test_gpus_are_filtered_sorted_and_coloured_as_requested(project: Project, ann: User, client: Client) -> None:
    host = make_host("box-1", gpus=3)
    running(project, ann, "train")
    seen(host, g0={"utilization": 20, "power_w": 400}, g1={"utilization": 90, "temperature_c": 90}, g2=None)
    assert order(page(client, "gpus/?sort=utilization")) == ["GPU-box-1-1", "GPU-box-1-0", "GPU-box-1-2"]
    assert order(page(client, "gpus/?sort=-utilization&as=table")) == ["GPU-box-1-0", "GPU-box-1-1", "GPU-box-1-2"]
    assert order(page(client, "gpus/?state=held")) == ["GPU-box-1-0"]
    assert order(page(client, "gpus/?q=TRAIN+ann")) == ["GPU-box-1-0"]
    assert order(page(client, "gpus/?q=nothing")) == []
    assert "heat-10" in cell(page(client, "gpus/?colour=power"), "GPU-box-1-0")
    assert "90 °C" in cell(page(client, "gpus/?colour=temperature"), "GPU-box-1-1")
    assert len(order(page(client, "gpus/?sort=nonsense&colour=nonsense&state=nonsense"))) == 3


def test_the_reason_for_a_throttled_gpu_is_shown(project: Project, client: Client) -> None:
    host = make_host("box-1", gpus=2)
    seen(host, g0={"utilization": 90, "throttle": 0x40}, g1={"utilization": 0, "throttle": 1})
    assert "slowed down by heat" in cell(page(client), "GPU-box-1-0")
    assert "slowed down" not in cell(page(client), "GPU-box-1-1")
    assert "not throttled" in page(client, "gpus/GPU-box-1-1/")


def test_a_run_of_another_project_is_not_named(project: Project, client: Client) -> None:
    host = make_host("box-1", gpus=1)
    other = make_project("other")
    running(other, join(other, make_user("evelyn")), "secret-run")
    seen(host, g0={"utilization": 50, "processes": ({"pid": 41, "user": "evelyn", "memory_mib": 7},)})
    for path in ("gpus/", "gpus/?as=table", "gpus/GPU-box-1-0/", "hosts/box-1/"):
        assert "a run of another project" in page(client, path)
        assert "secret-run" not in page(client, path)
        assert "evelyn" not in page(client, path)
    assert order(page(client, "gpus/?q=secret")) == []


def test_a_poll_gets_nothing_until_something_has_changed(project: Project, client: Client) -> None:
    host = make_host("box-1", gpus=1)
    seen(host, ago_s=10, g0=50)
    for path in ("gpus/", "gpus/GPU-box-1-0/", "hosts/box-1/"):
        poll = {**HTMX, "HX-PTag": client.get(f"/p/main/{path}")["HX-PTag"]}
        assert client.get(f"/p/main/{path}", headers=poll).status_code == 204
        seen(host, g0=60)
        fresh = client.get(f"/p/main/{path}", headers=poll)
        assert fresh.status_code == 200
        assert "60 %" in fresh.content.decode()
        assert "<html" not in fresh.content.decode()


def test_gpus_of_cloud_instances_are_shown_to_their_project(project: Project, ann: User, client: Client) -> None:
    job = start(cloud_job(make_run(project, ann, "on-aws", resources={"gpu": 1}), instance_type="g6.xlarge"))
    Job.objects.filter(pk=job.pk).update(
        gpus=["GPU-l4-0"], instance_type="g6.xlarge", started_at=timezone.now() - dt.timedelta(minutes=1)
    )
    job.refresh_from_db()
    intake.add_samples(job, [(to_ms(timezone.now()), [sample("GPU-l4-0", 77, name="NVIDIA L4")])])
    assert "<b>77 %</b>" in cell(page(client), "GPU-l4-0")
    assert "g6.xlarge" in page(client)
    assert "on-aws" in page(client, "gpus/GPU-l4-0/")
    other = join(make_project("other"), make_user("evelyn"))
    stranger = Client()
    stranger.force_login(other)
    assert "GPU-l4-0" not in stranger.get("/p/other/gpus/").content.decode()
    assert stranger.get("/p/other/gpus/GPU-l4-0/").status_code == 404


def test_a_gpu_shows_its_processes_its_last_hours_and_its_runs(project: Project, ann: User, client: Client) -> None:
    host = make_host("box-1", gpus=1)
    seen(host, ago_s=1200, g0=5)
    running(project, ann, "train")
    seen(host, g0={"utilization": 80, "processes": ({"pid": 4711, "user": "carl", "memory_mib": 2048},)})
    text = page(client, "gpus/GPU-box-1-0/")
    assert re.search(r">4711</td><td>carl</td><td class=\"num\">2 GB<", text)
    assert '"utilization": [' in text
    assert "80.0" in text
    assert "5.0" in text  # from when no job had it
    assert re.search(r'id="had-.*train', text)
    rows = page(client, "gpus/GPU-box-1-0/?as=table&range=6h")
    assert ">80 %<" in rows
    assert ">5 %<" in rows
    assert client.get("/p/main/gpus/GPU-nope/").status_code == 404


def test_the_chart_of_a_gpu_includes_its_free_time_and_all_its_runs(
    project: Project, ann: User, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_map_views, "SERIES", 3)
    host = make_host("box-1", gpus=1)
    seen(host, ago_s=1200, g0=5)
    for number in range(3):
        job = cloud_job(make_run(project, ann, f"run-{number}"))
        add_samples(job, "GPU-box-1-0", [80], timezone.now() - dt.timedelta(hours=2))
    seen(host, g0=37)
    text = page(client, "gpus/GPU-box-1-0/?as=table")
    assert ">37 %<" in text
    assert ">5 %<" in text


def test_how_many_gpus_there_are_costs_no_further_queries(project: Project, ann: User, client: Client) -> None:
    seen(make_host("box-1", gpus=2), g0=1, g1=2)
    running(project, ann, "one")
    page(client)
    with CaptureQueriesContext(connection) as few:
        page(client)
    for number in range(2, 6):
        host = make_host(f"box-{number}", gpus=4)
        for each in range(4):
            running(project, ann, f"run-{number}-{each}")
        seen(host, g0=1, g1=2, g2=3, g3=4)
    with CaptureQueriesContext(connection) as many:
        assert len(order(page(client))) == 18
    assert len(many) <= len(few)


def test_without_gpus_the_page_shows_how_to_add_some(project: Project, client: Client) -> None:
    make_host("box-1")
    assert "No host has a GPU" in page(client)


def test_a_host_shows_its_gpus_jobs_and_events(project: Project, ann: User, client: Client) -> None:
    host = make_host("box-1", gpus=2)
    ended = running(project, ann, "was-here")
    Job.objects.filter(pk=ended.pk).update(status="done", ended_at=timezone.now())
    Run.objects.filter(pk=ended.run_id).update(status="done")
    ended.allocations.all().delete()
    running(project, ann, "is-here")
    seen(host, g0=64)
    HostEvent.objects.create(host=host, kind="offline")
    text = page(client, "hosts/box-1/")
    assert "64 %" in text
    assert "in 2.5 ms" in text
    now, lately = text.index('id="host-jobs"'), text.index('id="host-ended"')
    assert now < text.index(">is-here<", now) < lately < text.index(">was-here<", lately)
    assert "Went offline" in text
    assert "Drain" not in text  # for admins of the deployment alone
    assert client.get("/p/main/hosts/nope/").status_code == 404


def test_a_host_shows_why_its_gpus_cannot_be_read(project: Project, client: Client) -> None:
    host = make_host("box-1", gpus=1)
    intake.add_snapshot(host, Snapshot((), error="GPU 0: GPU is lost"), to_ms(timezone.now()))
    assert "GPU 0: GPU is lost" in page(client, "hosts/box-1/")
    assert "GPU 0: GPU is lost" in page(client)
    plain = make_host("box-2")
    intake.add_snapshot(plain, Snapshot((), library=False), to_ms(timezone.now()))
    text = page(client, "hosts/box-2/")
    assert "no NVML library" in text
    assert "CPU runs only" in text
    assert "alert-danger" not in text


def test_a_host_is_drained_on_its_page_and_stays_there(project: Project, as_user: SignIn) -> None:
    make_host("box-1")
    root = as_user(make_user("root", is_superuser=True, is_staff=True))
    answer = submit(root, "/p/main/hosts/box-1/", to="/drain/", button="Drain", scripts=False)
    assert answer["Location"] == "/p/main/hosts/box-1/"
    assert "draining: no new jobs" in page(root, "hosts/box-1/")


def test_hosts_and_gpus_link_to_their_pages(project: Project, client: Client) -> None:
    make_host("box-1", gpus=1)
    text = page(client, "hosts/")
    assert 'href="/p/main/hosts/box-1/"' in text
    assert 'href="/p/main/gpus/GPU-box-1-0/"' in text
    assert 'href="/p/main/gpus/"' in text  # the navigation


def test_a_run_links_to_its_host_unless_that_was_removed(project: Project, ann: User, client: Client) -> None:
    make_host("box-1", gpus=1)
    running(project, ann, "train")
    link = 'href="/p/main/hosts/box-1/"'
    assert link in page(client, "runs/train/")
    Host.objects.update(left_at=timezone.now(), draining=True)
    assert link not in page(client, "runs/train/")


def test_mig_devices_of_one_gpu_are_distinguished(project: Project, client: Client) -> None:
    host = make_host("box-1")
    for uuid, kind in (("MIG-0", "1g.5gb"), ("MIG-GPU-1/2/0", "2g.10gb")):  # of a newer and of an older driver
        Gpu.objects.create(host=host, uuid=uuid, index=0, name=f"NVIDIA A100-SXM4-40GB MIG {kind}", memory_mib=4864)
    assert "GPU 0 · 1g.5gb" in cell(page(client), "MIG-0")
    assert "GPU 0 · 2g.10gb" in page(client, "gpus/MIG-GPU-1/2/0/")
    assert 'href="/p/main/gpus/MIG-GPU-1/2/0/"' in page(client, "hosts/")


def test_a_missing_gpu_held_by_a_run_is_shown_as_both(project: Project, ann: User, client: Client) -> None:
    host = make_host(gpus=2)
    running(project, ann, "train", 2)
    Gpu.objects.filter(uuid="GPU-box-1-1").update(present=False)
    row = re.search(r'<tr id="gpu-row-GPU-box-1-1">(.*?)</tr>', page(client, f"hosts/{host.name}/"), re.S)
    assert row
    assert "train" in row[1]
    assert "missing" in row[1]
    free = make_host("box-2", gpus=1)
    Gpu.objects.filter(host=free).update(present=False)
    cell = re.search(r'id="heat-GPU-box-2-0"(.*?)</a>', page(client), re.S)
    assert cell
    assert cell[1].count("missing") == 1


def test_gpus_of_hosts_that_take_no_runs_are_not_called_free(project: Project, client: Client) -> None:
    make_host("box-1", gpus=1), make_host("box-2", gpus=2, silent_s=3600), make_host("box-3", gpus=1, draining=True)
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page(client)))
    assert "1 free · 3 unavailable" in shown
    assert "host offline" in shown
    assert "host draining" in shown
    assert order(page(client, "gpus/?state=free")) == ["GPU-box-1-0"]
    assert "2 GPUs · offline" in shown
