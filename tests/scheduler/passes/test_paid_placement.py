"""Runs on offers of backends other than the team's own hosts (R25): which are taken, in which order, within what."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import Availability
from dstackweb.backends.models import Backend
from dstackweb.runs.models import Job, Queue, Run
from dstackweb.runs.selectors import why
from dstackweb.runs.states import JobStatus
from dstackweb.runs.usage import spent_this_month
from dstackweb.scheduler.cloud import backend_offers
from tests.factories import make_host, make_project, make_run, place_all
from tests.scheduler.passes.backend_offers_stub import StubMarket, offer

pytestmark = pytest.mark.django_db


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch) -> StubMarket:
    return StubMarket(monkeypatch)


def reason(run: Run) -> tuple[str, dict]:
    return why(Run.objects.select_related("queue").get(pk=run.pk))


def test_own_idle_capacity_is_used_first_and_then_the_cheapest_offer(
    project: Project, member: User, market: StubMarket
) -> None:
    make_host(cpus=1)
    market.has("cloud", offer("2.0", region="us"), offer("1.5", region="eu"), offer("1.5", region="ap"))
    own, paid = (make_run(project, member, backends=["hosts", "cloud"]) for _ in range(2))
    assert place_all() == 2
    assert Job.objects.get(run=own).host is not None
    job = Job.objects.get(run=paid)
    assert (job.host, job.backend.name, job.region, job.price) == (None, "cloud", "ap", Decimal("1.5"))
    event = Run.objects.get(pk=paid.pk).events.get(kind="provisioning")
    assert event.data["nodes"][0]["instance_type"] == "g5.xlarge"


def test_a_paid_backend_is_not_queried_for_a_run_that_does_not_name_it(
    project: Project, member: User, market: StubMarket
) -> None:
    market.has("cloud", offer())
    make_run(project, member)
    assert place_all() == 0
    assert market.asked == []


@pytest.mark.parametrize(
    ("backends", "taken"),
    [
        (["hosts", "batch", "workers"], "hosts"), (["workers", "batch", "hosts"], "workers"),
        (["batch", "hosts"], "batch"), (["cloud", "hosts"], "hosts"), (["cloud", "workers"], "workers"),
        (["workers", "batch"], "workers"), (None, "hosts"),
    ],
)  # fmt: skip
def test_of_backends_at_the_same_price_the_first_named_is_taken(
    project: Project, member: User, market: StubMarket, backends: list[str] | None, taken: str
) -> None:
    make_host()
    for name in ("batch", "workers"):
        market.has(name, offer("0", backend=name))
    market.has("cloud", offer("0.5"))
    run = make_run(project, member, **({"backends": backends} if backends else {}))
    place_all()
    assert [job.backend.name for job in run.jobs.select_related("backend")] == [taken]


def test_a_limit_of_gpus_counts_those_of_other_backends_too(project: Project, member: User, market: StubMarket) -> None:
    """R26."""
    market.has("cloud", offer())
    keys = {"resources": {"gpu": 1}, "backends": ["cloud"]}
    first, second = (make_run(project, member, **keys) for _ in range(2))
    Queue.objects.filter(pk=first.queue_id).update(max_gpus=1)
    assert place_all() == 1
    assert place_all() == 0
    assert (reason(second)[0], reason(second)[1]["used"]) == ("queue_limit", 1)


@pytest.mark.parametrize(
    ("keys", "offered", "outcome"),
    [
        ({"max_price": 0.5}, {}, "impossible"),
        ({"max_price": 1.0}, {}, "starting"),
        ({"regions": ["us-east-1"]}, {}, "impossible"),
        ({"instance_types": ["g5.xlarge"]}, {}, "starting"),
        ({"instance_types": ["p4d"]}, {}, "impossible"),
        ({}, {"spot": True}, "impossible"),
        ({"spot_policy": "spot"}, {}, "impossible"),
        ({"spot_policy": "spot"}, {"spot": True}, "starting"),
        ({"spot_policy": "auto"}, {"spot": True}, "starting"),
        ({}, {"availability": Availability.UNKNOWN}, "starting"),
        ({}, {"availability": Availability.NO_QUOTA}, "no_quota"),
        ({}, {"availability": Availability.NOT_AVAILABLE}, "waiting_for_capacity"),
        ({}, {"availability": Availability.BUSY}, "waiting_for_capacity"),
        ({"nodes": 2}, {"detail": {"fits": 1}}, "waiting_for_capacity"),
        ({"nodes": 2}, {"detail": {"fits": 2}}, "starting"),
        ({"labels": {"disk": "nvme"}}, {}, "impossible"),
    ],
)
def test_a_runs_constraints_decide_between_offers(
    project: Project, member: User, market: StubMarket, keys: dict, offered: dict, outcome: str
) -> None:
    market.has("cloud", offer(**offered))
    run = make_run(project, member, **({"backends": ["cloud"]} | keys))
    assert bool(place_all()) == (outcome == "starting")
    assert reason(run)[0] in (outcome, "")


def test_all_nodes_of_a_run_are_placed_in_one_backend_and_region(
    project: Project, member: User, market: StubMarket
) -> None:
    market.has(
        "cloud",
        offer("1.0", region="ap", detail={"fits": 2}),
        offer("2.0", region="eu", detail={"fits": 2}),
        offer("3.0", region="eu", instance_type="g6"),
    )
    run = make_run(project, member, nodes=3, backends=["cloud"])
    assert place_all() == 1
    jobs = Job.objects.filter(run=run).order_by("node")
    assert [(job.region, job.price) for job in jobs] == [("eu", 2), ("eu", 2), ("eu", 3)]


def test_an_offer_is_used_at_most_as_often_as_it_fits(project: Project, member: User, market: StubMarket) -> None:
    market.has("cloud", offer(detail={"fits": 2}))
    for _ in range(3):
        make_run(project, member, backends=["cloud"])
    assert place_all() == 2


def test_a_failing_backend_does_not_affect_others(project: Project, member: User, market: StubMarket) -> None:
    make_host(cpus=1)
    market.has("cloud", fails=RuntimeError("throttled"))
    market.has("other", offer(backend="other"))
    first = make_run(project, member, backends=["cloud"])
    second = make_run(project, member, backends=["cloud", "other"])
    third = make_run(project, member)
    assert place_all() == 2
    assert reason(first) == ("backend_unavailable", {"code": "failed", "backends": ["cloud"]})
    assert Job.objects.get(run=second).backend.name == "other"
    assert Job.objects.get(run=third).host is not None


@pytest.mark.parametrize(("enabled", "code"), [(True, "not_served"), (False, "no_such_backend")])
def test_an_unserved_or_disabled_backend_is_skipped_with_a_reason(
    project: Project, member: User, enabled: bool, code: str
) -> None:
    Backend.objects.create(name="cloud", kind="unheard", enabled=enabled)
    run = make_run(project, member, backends=["cloud"])
    assert place_all() == 0
    assert reason(run) == ("backend_unavailable", {"code": code, "backends": ["cloud"]})


def test_a_backend_is_queried_once_per_pass_for_the_same_requirements(
    project: Project, member: User, market: StubMarket
) -> None:
    market.has("cloud", offer(availability=Availability.BUSY))
    for nodes in (1, 2, 3):
        make_run(project, member, nodes=nodes, backends=["cloud"])
    place_all()
    assert market.asked == ["cloud"]


def test_a_pass_sums_up_the_spending_of_a_project_once(
    project: Project, member: User, market: StubMarket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand machines in a month take a tenth of a second, and a pass places hundreds of runs."""
    market.has("cloud", offer())
    project.monthly_budget = Decimal(5)
    project.save()
    added: list[int] = []
    monkeypatch.setattr(
        backend_offers, "spent_this_month", lambda project_id, _: added.append(project_id) or Decimal(0)
    )
    for cpus in (1, 2, 3):
        make_run(project, member, backends=["cloud"], resources={"cpu": cpus})
    assert place_all() == 3
    assert added == [project.pk]


def test_a_spent_budget_holds_paid_placements_and_only_these(
    project: Project, member: User, market: StubMarket
) -> None:
    """R25."""
    make_host(cpus=1)
    market.has("cloud", offer("10.0"))
    project.monthly_budget = Decimal(5)
    project.save()
    first = make_run(project, member, backends=["cloud"])
    assert place_all() == 1
    Job.objects.filter(run=first).update(placed_at=timezone.now() - dt.timedelta(minutes=31))
    held = make_run(project, member, backends=["cloud"])
    own = make_run(project, member, backends=["hosts", "cloud"])
    other = make_run(make_project(), member, role="manager", backends=["cloud"])
    # In the first half hour of a month, what was spent before it doesn't count.
    over = spent_this_month(project.pk, timezone.now()) >= 5
    assert place_all() == (2 if over else 3)
    if over:
        code, data = reason(held)
        assert (code, data["budget"]) == ("budget_limit", "5.00")
        assert Decimal(data["spent"]) >= 5
    assert Job.objects.get(run=own).host is not None
    assert Job.objects.filter(run=other).exists()


def test_a_month_costs_the_parts_of_priced_jobs_that_lie_in_it(project: Project, member: User) -> None:
    """R25."""
    now = dt.datetime(2026, 5, 11, 0, 0, tzinfo=dt.UTC)
    hours = [
        ("2.00", now - dt.timedelta(hours=3), None, 6),
        ("1.00", now - dt.timedelta(days=11), now - dt.timedelta(days=9, hours=12), 12),
        ("1.00", now - dt.timedelta(days=40), now - dt.timedelta(days=20), 0),
        ("0.50", now - dt.timedelta(days=2), now - dt.timedelta(days=1), 12),
        ("0.00", now - dt.timedelta(days=2), None, 0),
    ]
    cloud = Backend.objects.create(name="cloud", kind="aws")
    for price, began, ended, _cost in hours:
        Job.objects.create(
            run=make_run(project, member), attempt=1, backend=cloud, price=price, placed_at=began, ended_at=ended,
            status=JobStatus.DONE if ended else JobStatus.RUNNING,
        )  # fmt: skip
    assert spent_this_month(project.pk, now) == sum(cost for *_, cost in hours)
    assert spent_this_month(make_project().pk, now) == 0
