"""Runs on clusters whose room is counted: they start in the queue's order, and no room is given twice."""

from __future__ import annotations

import datetime as dt
import random
import time
from typing import Any

import pytest
from django.conf import settings
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends import registry, services
from dstackweb.backends.models import Backend, Instance
from dstackweb.offers import sources
from dstackweb.runs import attempts
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import Job, Run
from dstackweb.runs.selectors import why
from dstackweb.runs.services import Submission
from dstackweb.runs.states import Reason
from dstackweb.scheduler import watch
from dstackweb.scheduler.cloud import agents, launching, watch as cloud_watch
from dstackweb.scheduler.passes.decision import plan
from dstackweb.scheduler.placement.launches import Launch
from tests.backends.small_clusters import CLUSTERS, SmallCluster, SmallDask, SmallRay, SmallSlurm
from tests.factories import join, make_project, make_run, place_all

pytestmark = pytest.mark.django_db
ONE: dict[str, Any] = {"backends": ["cluster"], "resources": {"cpu": "1..", "memory": "100MB.."}}


def submit(project: Project, user: User, **keys: Any) -> Run:
    """A run of a CPU on the backend `cluster`, unless it says otherwise."""
    return make_run(project, user, role="manager", **ONE | keys)


class Site:
    """A server with clusters, and its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.monotonic = timezone.now(), 1000.0
        self.patch, self.clusters = monkeypatch, dict[str, SmallCluster]()
        monkeypatch.setattr(timezone, "now", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)
        monkeypatch.setattr(settings, "DSTACKWEB_WATCH_EVERY_S", 60 / watch.MAX_STEP)
        monkeypatch.setattr(settings, "DSTACKWEB_SHARED_UID", True)
        monkeypatch.setattr(watch, "boot_id", lambda: "boot")

    def add(self, cluster: SmallCluster, name: str = "cluster", **config: Any) -> SmallCluster:
        cluster.install(self.patch)
        services.put(name, cluster.kind, {"projects": ["main"], **cluster.config, **config})
        self.clusters[name] = cluster
        self.read()
        return cluster

    def read(self) -> None:
        """Read all clusters anew."""
        for backend in Backend.objects.filter(name__in=self.clusters):
            driver = registry.driver(backend)
            assert registry.is_counted(driver)
            sources.refresh(backend, driver.key, share=0)

    def order(self) -> None:
        """Two passes, then all orders, as the passes ask for them."""
        place_all()
        place_all()
        waiting = Job.objects.filter(instance__status="requested").order_by("placed_at", "run__rank", "node")
        cloud_watch.poll_jobs([str(pk) for pk in waiting.values_list("pk", flat=True)])
        cloud_watch.poll_all()

    def tick(self, seconds: float = 31.0) -> None:
        """Time passes, as the watcher's and everybody's; clusters and their jobs are looked at."""
        while seconds > 0:
            step = min(seconds, 15.0)
            self.now += dt.timedelta(seconds=step)
            self.monotonic += step
            seconds -= step
            watch.watch()
            cloud_watch.poll_all()

    def start(self) -> list[Run]:
        """The agents of jobs that the clusters started call, and their runners start the commands: in that order."""
        runs = []
        for cluster in self.clusters.values():
            for name in cluster.started:
                instance = Instance.objects.filter(pk=name, status="starting", ready_at=None).first()
                job = Job.objects.filter(pk=instance.holder).first() if instance else None
                if instance is None or job is None:
                    continue
                agents.join(instance.pk, agents.join_token(instance.pk)[0], f"n{instance.pk}"[:60], gpus=[], address="")
                attempts.claim_job(job.pk, f"r{job.pk}"[:60], "there")
                attempts.start_job(job.pk)
                runs.append(Run.objects.get(pk=job.run_id))
        return runs

    def end(self, run: Run) -> None:
        """Its commands end, and so does its job in the cluster."""
        job = Job.objects.get(run=run, attempt=run.attempt)
        attempts.report_end(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
        for cluster in self.clusters.values():
            cluster.end(*[one for one in cluster.jobs if one.name == str(job.instance_id)])
        cloud_watch.poll_all()


@pytest.fixture
def site(db: None, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


@pytest.fixture(params=CLUSTERS, ids=lambda of: of.kind)
def kind(request: pytest.FixtureRequest) -> type[SmallCluster]:
    """Each kind of cluster in turn."""
    found: type[SmallCluster] = request.param
    return found


def fresh(run: Run) -> Run:
    return Run.objects.get(pk=run.pk)


@pytest.mark.nightly
def test_24_runs_of_three_priorities_start_in_order_and_an_urgent_one_next(
    project: Project, member: User, site: Site, kind: type[SmallCluster]
) -> None:
    cluster = site.add(kind())
    priorities = [10, 50, 90] * 8
    random.Random(1).shuffle(priorities)
    for priority in priorities:
        submit(project, member, priority=priority)
    begun: list[Run] = []
    running: list[Run] = []
    for turn in range(60):
        site.order()
        assert len(cluster.alive()) <= 8, "nothing is ordered that does not fit"
        started = site.start()
        begun, running = begun + started, running + started
        if turn == 4:
            urgent = submit(project, member, priority=100)
        if running:
            site.end(running.pop(0))
        site.read()
    order = [run.priority for run in begun]
    at = order.index(100)
    assert begun[at].pk == urgent.pk
    assert at == 8 + 4, "the first place that was free after it was submitted"
    assert [*order[:at], *order[at + 1 :]] == sorted(priorities, reverse=True)
    assert set(Run.objects.values_list("attempt", "status")) == {(1, "done")}


def test_a_place_that_becomes_free_goes_to_the_first_in_the_queue_even_if_it_came_last(
    project: Project, member: User, site: Site, kind: type[SmallCluster]
) -> None:
    cluster = site.add(kind())
    for priority in [50] * 7 + [10, 10, 90]:
        submit(project, member, priority=priority)
    site.order()
    running = site.start()
    assert sorted(run.priority for run in running) == [50] * 7 + [90]
    urgent = submit(project, member, priority=100)
    site.end(running[0])
    site.read()
    site.order()
    assert [run.pk for run in site.start()] == [urgent.pk]
    assert (len(cluster.alive()), cluster.refused) == (8, 0)
    assert set(Run.objects.values_list("attempt", flat=True)) == {1}


def test_what_is_ordered_is_not_ordered_again_before_a_reading_counts_it(
    project: Project, member: User, site: Site, kind: type[SmallCluster]
) -> None:
    cluster = site.add(kind())
    for _ in range(12):
        submit(project, member)
    assert [place_all(), place_all()] == [8, 0], "two passes before any order was sent"
    cloud_watch.poll_all()
    assert place_all() == 0, "the orders are answered, and the reading is older"
    site.read()
    assert place_all() == 0
    assert (len(cluster.alive()), cluster.refused) == (8, 0)


def test_an_order_that_was_answered_while_a_reading_was_under_way_is_taken_from_it(
    project: Project, member: User, site: Site, kind: type[SmallCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = site.add(kind())
    for _ in range(6):
        submit(project, member)
    place_all()
    driver: Any = type(registry.driver(Backend.objects.get(name="cluster")))
    fetch = driver.fetch

    def fetch_before_orders(self: Any, key: Any) -> Any:
        value = fetch(self, key)
        cloud_watch.poll_all()
        return value

    monkeypatch.setattr(driver, "fetch", fetch_before_orders)
    site.read()
    monkeypatch.undo()
    assert len(cluster.alive()) == 6
    for _ in range(6):
        submit(project, member)
    assert place_all() == 2


def test_mixed_shapes_share_the_room_of_each_node(
    project: Project, member: User, site: Site, kind: type[SmallCluster]
) -> None:
    """A pass counted each shape by itself: the same CPUs were offered to each."""
    cluster = site.add(kind())

    def shaped(cpus: int, memory: str, gpus: int = 0) -> Run:
        asks = {"cpu": f"{cpus}..", "memory": f"{memory}.."} | ({"gpu": f"A100:{gpus}"} if gpus else {})
        return submit(project, member, resources=asks)

    first = [shaped(1, "500MB", 2), shaped(4, "500MB")]
    late = [shaped(1, "100MB", 1), shaped(4, "100MB"), shaped(1, "3600MB"), shaped(3, "100MB"), shaped(1, "100MB")]
    site.order()
    site.read()
    site.order()
    assert {fresh(run).status for run in first} == {"provisioning"}
    placed = [run for run in late if fresh(run).status == "provisioning"]
    assert placed == [late[3]], "n1 has 3 CPUs, 3500 MB and no GPU left, n2 nothing"
    assert all(job.node for job in cluster.alive())
    assert cluster.refused == 0


def test_all_nodes_of_a_run_fit_at_once_or_none_is_placed(
    project: Project, member: User, site: Site, kind: type[SmallCluster]
) -> None:
    cluster = site.add(kind())
    two_of_three = submit(project, member, nodes=3, priority=90, resources={"cpu": "3..", "memory": "100MB.."})
    pair = submit(project, member, nodes=2, resources={"cpu": "3..", "memory": "100MB.."})
    small = [submit(project, member) for _ in range(3)]
    site.order()
    assert fresh(two_of_three).status == "submitted"
    assert fresh(pair).status == "provisioning"
    assert [fresh(run).status for run in small] == ["provisioning", "provisioning", "submitted"]
    assert len(cluster.alive()) == 4


@pytest.mark.parametrize("kind", [SmallDask, SmallRay], ids=lambda of: of.kind)
def test_a_refusal_for_lack_of_room_costs_neither_attempt_nor_place(
    project: Project, member: User, site: Site, kind: type[SmallCluster]
) -> None:
    cluster = site.add(kind())
    run = submit(project, member, priority=50)
    before = (run.rank, run.attempt, run.queued_at)
    assert place_all() == 1
    strangers = cluster.take_room(8)
    cloud_watch.poll_all()
    run = fresh(run)
    assert (run.status, run.retry_at) == ("submitted", None)
    assert (run.rank, run.attempt, run.queued_at) == before
    assert not Job.objects.filter(run=run).exists()
    assert [event.kind for event in run.events.order_by("id")][-2:] == ["offer_failed", "returned"]
    assert place_all() == 0, "the reading that showed room is refuted"
    assert why(run)[0] == WaitReason.WAITING_FOR_CAPACITY
    site.read()
    assert place_all() == 0, "the cluster is full"
    lower = submit(project, member, priority=10)
    cluster.end(strangers[0])
    site.read()
    assert place_all() == 1
    cloud_watch.poll_all()
    assert [run.pk for run in site.start()] == [run.pk]
    assert fresh(lower).status == "submitted"
    assert fresh(run).attempt == 1


def test_a_refusal_of_one_node_takes_the_whole_run_back(project: Project, member: User, site: Site) -> None:
    cluster = site.add(SmallDask())
    run = submit(project, member, nodes=2, resources={"cpu": "4..", "memory": "100MB.."})
    assert place_all() == 1
    cluster.take_room(1)
    cloud_watch.poll_all()
    run = fresh(run)
    assert (run.status, run.attempt, Job.objects.count()) == ("submitted", 1, 0)
    site.tick()
    assert [job.name for job in cluster.alive()] == ["stranger"], "its other node was given back"
    assert set(Instance.objects.values_list("holder", flat=True)) == {None}


def test_a_node_whose_runner_has_claimed_its_job_keeps_its_attempt_apart(
    project: Project, member: User, site: Site
) -> None:
    cluster = site.add(SmallDask())
    run = submit(project, member, nodes=2, resources={"cpu": "4..", "memory": "100MB.."})
    assert place_all() == 1
    first, second = Job.objects.filter(run=run).order_by("node")
    order = launching._order_instance

    def claim_and_fill(launch: Launch, *rest: Any) -> Any:
        answer = order(launch, *rest)
        if launch.job == first.pk:
            attempts.claim_job(first.pk, "nonce", "there")
            cluster.take_room(1)
        return answer

    site.patch.setattr(launching, "_order_instance", claim_and_fill)
    launching.launch_waiting()
    assert Job.objects.get(pk=second.pk).termination_reason == Reason.NOT_CLAIMED
    attempts.end_job(first.pk, Reason.TERMINATED_BY_SERVER)
    assert (fresh(run).status, fresh(run).attempt) == ("submitted", 2)


def test_what_could_never_fit_is_no_lack_of_room(project: Project, member: User, site: Site) -> None:
    """The cluster became smaller since it was read: the run waits at its place, and is not ordered again at once."""
    site.add(SmallDask())
    run = submit(project, member, resources={"cpu": "4..", "memory": "100MB.."})
    assert place_all() == 1
    site.patch.setattr("tests.backends.small_clusters.NODES", {"n1": (2, 4000, 0)})
    cloud_watch.poll_all()
    assert (fresh(run).status, fresh(run).attempt) == ("submitted", 1)
    assert place_all() == 0


def test_slurm_keeps_no_run_of_ours_waiting_for_room(project: Project, member: User, site: Site) -> None:
    cluster = site.add(SmallSlurm())
    run = submit(project, member, priority=50)
    assert place_all() == 1
    strangers = cluster.take_room(8)
    cloud_watch.poll_all()
    assert [job.node for job in cluster.alive() if job.deployment] == [""], "it waits in Slurm"
    site.tick(45)
    assert fresh(run).status == "provisioning", "Slurm may look at its queue every minute only"
    site.tick(60)
    run = fresh(run)
    assert (run.status, run.attempt, run.retry_at) == ("submitted", 1, None)
    assert [job.name for job in cluster.alive()] == ["stranger"] * 8
    urgent = submit(project, member, priority=100)
    cluster.end(strangers[0])
    site.read()
    site.order()
    assert [run.pk for run in site.start()] == [urgent.pk]
    assert fresh(run).status == "submitted"


def test_a_job_that_slurm_starts_at_the_last_moment_is_kept(project: Project, member: User, site: Site) -> None:
    cluster = site.add(SmallSlurm())
    run = submit(project, member)
    assert place_all() == 1
    strangers = cluster.take_room(8)
    cloud_watch.poll_all()
    site.tick(45)
    cluster.end(*strangers)
    site.tick(60)
    assert [started.pk for started in site.start()] == [run.pk]


def test_two_partitions_share_their_nodes(project: Project, member: User, site: Site) -> None:
    cluster = site.add(SmallSlurm(), partitions=["main", "short"])
    for number in range(12):
        submit(project, member, regions=["short" if number % 2 else "main"])
    site.order()
    site.order()
    assert {job.partition for job in cluster.alive()} == {"main", "short"}
    assert [bool(job.node) for job in cluster.alive()] == [True] * 8


def test_backends_of_one_cluster_count_each_others_orders(project: Project, member: User, site: Site) -> None:
    """As where each group of projects has a user of its own at the login node."""
    other = make_project("others")
    their_member = join(other, member)
    cluster = site.add(SmallSlurm(), "ours", ssh_host="ours@login.example")
    site.clusters["theirs"] = cluster
    config = {"projects": ["others"], "partitions": ["main"], "ssh_host": "theirs@login.example"}
    services.put("theirs", "slurm", config)
    site.read()
    for _ in range(6):
        submit(project, member, backends=["ours"])
        submit(other, their_member, backends=["theirs"])
    assert place_all() == 8
    assert place_all() == 0
    cloud_watch.poll_all()
    assert place_all() == 0
    assert [bool(job.node) for job in cluster.alive()] == [True] * 8


def test_several_clusters_are_filled_at_once(project: Project, member: User, site: Site) -> None:
    clusters = [site.add(kind(), kind.kind) for kind in (SmallSlurm, SmallDask, SmallRay)]
    for priority in [10] * 12 + [90] * 18:
        submit(project, member, priority=priority, backends=list(site.clusters))
    site.order()
    assert [len(cluster.alive()) for cluster in clusters] == [8, 8, 8]
    assert sorted(run.priority for run in site.start()) == [10] * 6 + [90] * 18


def test_a_cluster_that_can_not_be_read_gets_no_more_than_it_had(
    project: Project, member: User, site: Site, kind: type[SmallCluster]
) -> None:
    cluster = site.add(kind())
    for _ in range(12):
        submit(project, member)
    site.order()
    cluster.away = True
    for run in site.start()[:3]:
        attempts.report_end(Job.objects.get(run=run).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    site.read()
    assert place_all() == 0, "nothing says that their room is free"


def test_a_lost_answer_keeps_its_room(project: Project, member: User, site: Site, kind: type[SmallCluster]) -> None:
    cluster = site.add(kind())
    for _ in range(9):
        submit(project, member)
    assert place_all() == 8
    cluster.away = True
    cloud_watch.poll_all()
    assert place_all() == 0
    cluster.away = False
    site.read()
    assert place_all() == 0, "their orders are still to be sent, and a reading does not have them"
    site.tick()
    assert (len(cluster.alive()), cluster.refused) == (8, 0)


def test_why_a_run_waits_and_its_plan_see_what_is_ordered(
    project: Project, member: User, site: Site, kind: type[SmallCluster]
) -> None:
    site.add(kind())
    runs = [submit(project, member) for _ in range(9)]
    site.order()
    assert why(fresh(runs[-1]))[0] == WaitReason.WAITING_FOR_CAPACITY
    config = {"type": "task", "commands": ["true"], **ONE}
    [offer] = plan(project, member, "member", Submission(config)).offers
    assert (offer.availability, offer.detail["fits"]) == ("busy", 0)
