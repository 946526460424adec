"""Why a run waits: every candidate place, with its code."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import Availability
from dstackweb.backends.models import Backend
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.selectors import find_run, why
from dstackweb.runs.services import Submission
from dstackweb.scheduler.passes.decision import decide_now, plan
from dstackweb.wording import places, waiting
from tests.factories import make_host, make_run, place_all
from tests.scheduler.passes.backend_offers_stub import StubMarket, offer

pytestmark = pytest.mark.django_db


def codes(run: Run) -> dict[str, str]:
    return {tried.where or tried.backend: tried.code for tried in decide_now(run).candidates}


def fresh(project: Project, run: Run) -> Run:
    return find_run(project, str(run.uid))


def test_each_host_and_each_offer_is_a_candidate_with_its_reason(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R27."""
    cellar = {"region": "cellar"}
    make_host("away", gpus=1, silent_s=1e6, labels=cellar)
    make_host("drained", gpus=1, draining=True, labels=cellar)
    make_host("full", gpus=1, labels=cellar)
    make_host("small", labels=cellar)
    make_host("elsewhere", gpus=1, labels={"region": "attic"})
    StubMarket(monkeypatch).has(
        "cloud",
        offer("0.5", instance_type="out", availability=Availability.NO_QUOTA, region="cellar"),
        offer("9.0", instance_type="dear", region="cellar"),
        offer("9.5", instance_type="dear", region="cellar", spot=True),
    )
    make_run(project, member, resources={"gpu": 1}, instance_types=["full"])
    place_all()
    run = make_run(
        project, member, resources={"gpu": 1}, backends=["hosts", "cloud", "nowhere"], regions=["cellar"], max_price=2.0
    )
    assert codes(fresh(project, run)) == {
        "away": "offline", "drained": "draining", "full": "busy", "small": "too_small", "elsewhere": "other_region",
        "nowhere": "no_such_backend", "cellar out": "no_quota", "cellar dear": "too_expensive",
        "cellar dear (spot)": "is_spot",
    }  # fmt: skip
    for tried in decide_now(fresh(project, run)).candidates:
        assert places.tried(tried.code, tried.data).label
    priced = [tried.price for tried in decide_now(fresh(project, run)).candidates if tried.backend == "cloud"]
    assert priced == [Decimal("0.5"), Decimal("9.0"), Decimal("9.5")]


def test_a_plan_offers_no_host_to_a_run_that_requires_spot(project: Project, member: User) -> None:
    make_host()
    submission = Submission({"type": "task", "commands": ["true"], "spot_policy": "spot"})
    planned = plan(project, member, "member", submission)
    assert planned.impossible
    assert planned.offers == []


def test_a_plan_compares_the_backends_that_the_run_uses_or_could_name(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host(gpus=1)
    make_run(project, member, resources={"gpu": 1}, max_duration="30m")
    place_all()
    market = StubMarket(monkeypatch)
    market.has("cloud", offer("3.06"))
    market.has("small", offer(backend="small", availability=Availability.NO_QUOTA))
    market.has("broken", fails=RuntimeError("down"))
    config = {"type": "task", "commands": ["true"], "resources": {"gpu": 1}, "backends": ["hosts", "small"], "nodes": 1}
    planned = plan(project, member, "member", Submission(config))
    found = [
        (one.backend, one.used, one.waits.reason.value if one.waits else None, one.price) for one in planned.backends
    ]
    assert found == [
        ("hosts", True, "waiting_for_capacity", Decimal(0)),
        ("small", True, "no_quota", Decimal("1.0")),
        ("cloud", False, None, Decimal("3.06")),
        ("broken", False, "backend_unavailable", None),
    ]
    [hosts, *_] = planned.backends
    assert hosts.waits is not None
    assert "1 busy until" in waiting.reason(hosts.waits.reason, hosts.waits.data).text
    assert planned.offers[0].backend == "hosts"


@pytest.mark.parametrize("backends", [["workers", "hosts"], ["hosts", "workers"]])
def test_a_plan_lists_what_is_free_in_the_order_in_which_the_run_names_it(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch, backends: list[str]
) -> None:
    make_host()
    StubMarket(monkeypatch).has("workers", offer("0", backend="workers"))
    planned = plan(project, member, "member", Submission({"type": "task", "commands": ["true"], "backends": backends}))
    assert [one.backend for one in planned.backends] == backends


def test_a_plan_names_no_backend_of_other_projects(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host()
    StubMarket(monkeypatch, "slurm").has("theirs", offer("0", backend="theirs"))
    Backend.objects.update(config={"projects": ["other"]})
    config = {"type": "task", "commands": ["true"], "backends": ["hosts"]}
    planned = plan(project, member, "member", Submission(config))
    assert [one.backend for one in planned.backends] == ["hosts"]


def test_the_outcome_is_the_one_of_the_pass(project: Project, member: User) -> None:
    make_host(gpus=2)
    make_run(project, member, resources={"gpu": 1}, max_duration="30m")
    place_all()
    run = make_run(project, member, resources={"gpu": 2})
    place_all()
    decided = decide_now(fresh(project, run))
    assert (decided.outcome, decided.data) == why(fresh(project, run))
    text = waiting.reason(decided.outcome, decided.data).text
    assert "needs 2 GPUs, 1 of 2 free on box-1; 1 busy until" in text


def test_a_run_that_fits_is_about_to_start_and_one_outside_the_queue_is_not_waiting(
    project: Project, member: User
) -> None:
    make_host()
    run = make_run(project, member)
    assert decide_now(fresh(project, run)).fits
    place_all()
    assert decide_now(fresh(project, run)).outcome == "not_waiting"


def test_a_paused_queue_and_each_limit_are_reported(project: Project, member: User) -> None:
    make_host()
    make_run(project, member)
    place_all()
    run = make_run(project, member)
    Queue.objects.filter(pk=run.queue_id).update(paused=True, max_running=1, max_running_per_user=1)
    decided = decide_now(fresh(project, run))
    assert decided.outcome == "queue_paused"
    assert [waits.data.get("code", "") for waits in decided.blockers] == ["", "max_running_per_user", "max_running"]
    Queue.objects.filter(pk=run.queue_id).update(paused=False)
    assert decide_now(fresh(project, run)).outcome == "user_limit"


def test_reserved_hosts_are_marked_one_by_one(project: Project, member: User) -> None:
    make_host(gpus=2)
    make_run(project, member, resources={"gpu": 1}, max_duration="30m")
    place_all()
    big = make_run(project, member, "big", resources={"gpu": 2})
    Run.objects.filter(pk=big.pk).update(queued_at=timezone.now() - dt.timedelta(hours=1))
    place_all()
    run = make_run(project, member, resources={"gpu": 1}, max_duration="2h")
    decided = decide_now(fresh(project, run))
    assert decided.outcome == "reserved_for_other"
    assert [tried.code for tried in decided.candidates] == ["reserved"]
    assert decided.reservation is not None
    assert decided.reservation.run == big
    own = decide_now(fresh(project, big))
    assert own.reservation is not None
    assert own.reservation.run == big
