"""An answer that makes no sense is a failed answer: what is known stays, marked, and nothing ends because of it."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.aws import ami, client as aws_client, rate_limits
from dstackweb.backends.aws.kind import AwsBackend
from dstackweb.backends.contract import InstanceOrder, SourceFailed, SourceKey, SourceState
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.offers import catalog, source_rows, sources
from dstackweb.runs.models import Verdict
from dstackweb.scheduler.cloud import watch
from dstackweb.spec.effective import Requirements
from standins.aws import Cloud
from tests.backends.kinds import use_driver
from tests.factories import make_run, place_all
from tests.forms import submit
from tests.offers.cloud_stub import Clock, read

REGION = "us-east-1"
GPU = Requirements(gpu_count_min=1)
XMLNS = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'
ERROR = "<Response><Errors><Error><Code>InternalError</Code><Message>?</Message></Error></Errors></Response>"
BODIES = {
    "cut off": "{oops", "empty": "", "null": "null", "a list": "[1]", "HTML": "<html><body>Welcome</body></html>",
    "cut-off XML": f"<DescribeInstancesResponse {XMLNS}><reservationSet><item>", "an error with 200": ERROR,
    "no list": json.dumps({"PriceList": None, "Quotas": "many", "Parameter": 5}),
}  # fmt: skip

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture
def cached(cloud: Cloud, transactional_db: None, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Backend:
    """A backend with four sources, behind the cache of offers."""
    settings.DSTACKWEB_PUBLIC_URL = "https://gpus.example.org"
    for name, value in cloud.env.items():
        monkeypatch.setenv(name, value)
    use_driver(monkeypatch, "aws", AwsBackend)
    monkeypatch.setattr(sources, "TICK_S", 60.0)
    monkeypatch.setattr(aws_client, "Aws", partial(aws_client.Aws, patience=aws_client.PROBE))
    sources.forget()
    return Backend.objects.create(name="aws", kind="aws", config={"regions": [REGION], "families": ["g5"]})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def refresh(backend: Backend, clock: Clock) -> None:
    """Refresh by hand, later than the least time between two calls."""
    clock.pass_s(source_rows.REFRESH_EVERY_S + 1)
    sources.refresh_now(backend)
    sources.refresh_due(timezone.now())


def states(backend: Backend) -> dict[str, tuple[SourceState, str]]:
    found = {key.source: read(backend, key) for key in AwsBackend(backend).wanted()}
    return {name: (one.state, str((one.error or {}).get("code", ""))) for name, one in found.items()}


@pytest.mark.both_sides
def test_of_any_source_leaves_its_last_good_value(cached: Backend, cloud: Cloud, clock: Clock) -> None:
    sources.refresh_due(timezone.now())
    before = catalog.CachedDriver(cached).offers(GPU)
    for name, body in BODIES.items():
        cloud.answer("*", bodies=[body])
        refresh(cached, clock)
        assert set(states(cached).values()) == {(SourceState.FRESH, "nonsense")}, name
        assert catalog.CachedDriver(cached).offers(GPU) == before != []
    cloud.answer_as_usual()
    refresh(cached, clock)
    assert set(states(cached).values()) == {(SourceState.FRESH, "")}


def test_in_another_charset_is_a_failed_answer(aws: AwsBackend, cloud: Cloud) -> None:
    cloud.answer("*", bodies=['{"Quotas": []}', f"<DescribeInstancesResponse {XMLNS}/>"], charset="utf-16")
    for source in ("quotas", "spot_prices"):
        assert failure(aws, source).code == "nonsense"


@pytest.mark.both_sides
def test_of_the_price_list_shows_the_old_offers_with_the_error_and_lets_a_run_wait(
    cached: Backend, cloud: Cloud, clock: Clock, project: Project, member: User, client: Client
) -> None:
    sources.refresh_due(timezone.now())
    cloud.answer("pricing", bodies=["{oops"])
    refresh(cached, clock)
    client.force_login(member)
    page = client.get("/p/main/offers/?spot=false").content.decode()
    assert "g5.xlarge" in page
    assert "Unreadable answer from pricing:GetProducts in" in page
    config = "type: task\ncommands: [echo]\nbackends: [aws]\nresources: {gpu: A10G}\nspot_policy: on-demand\n"
    plan = submit(client, "/p/main/submit/", {"config": config}, button="Show plan").content.decode()
    assert "g5.xlarge" in plan
    cloud.capacity(0)
    run = make_run(project, member, backends=["aws"], resources={"gpu": "A10G"}, spot_policy="on-demand")
    place_all()
    run.refresh_from_db()
    assert run.status == "provisioning"


@pytest.mark.both_sides
def test_of_the_price_list_from_the_start_lets_an_on_demand_run_wait_for_the_backend(
    cached: Backend, cloud: Cloud, project: Project, member: User
) -> None:
    cloud.answer("pricing", bodies=["{oops"])
    sources.refresh_due(timezone.now())
    run = make_run(project, member, backends=["aws"], resources={"gpu": "A10G"}, spot_policy="on-demand")
    place_all()
    assert Verdict.objects.get(shape=run.shape).reason == "backend_unavailable"


def failure(aws: AwsBackend, source: str) -> SourceFailed:
    with pytest.raises(SourceFailed) as failed:
        aws.fetch(SourceKey(source, REGION))
    return failed.value


@pytest.mark.parametrize("tokens", [["a", "b"], ["a"], ["{n}"]], ids=["in a circle", "that repeats", "without an end"])
def test_of_pages_is_a_failed_answer(
    aws: AwsBackend, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tokens: list[str]
) -> None:
    monkeypatch.setitem(rate_limits.RATES, "service-quotas", rate_limits.RateLimit(1000, 1000))
    cloud.answer("servicequotas", bodies=[json.dumps({"Quotas": [], "NextToken": token}) for token in tokens])
    failed = failure(aws, "quotas")
    assert (failed.code, failed.data["what"]) == ("nonsense", "pages")
    assert cloud.count("servicequotas") <= aws_client.MAX_PAGES


def quota(code: str, value: Any) -> dict[str, Any]:
    return {"QuotaCode": code, "Value": value}


def test_of_one_quota_leaves_the_others(aws: AwsBackend, cloud: Cloud) -> None:
    nonsense = ["L-417A185B", "L-7212CCBC", "L-1216C47A", "L-34B43A08", "L-F7808C92"]
    values = [float("nan"), float("inf"), -1, "many", None]
    listed = [quota(code, value) for code, value in zip(nonsense, values, strict=True)]
    listed += [None, 5, {"QuotaCode": ["L-1216C47A"]}, quota("L-DB2E81BA", 64.0)]
    cloud.answer("servicequotas", bodies=[json.dumps({"Quotas": listed})])
    assert aws.fetch(SourceKey("quotas", REGION)) == {"L-DB2E81BA": 64}


def product(name: Any, usd: Any) -> str:
    attributes = {"instanceType": name, "regionCode": REGION}
    terms = {"OnDemand": {"t": {"priceDimensions": {"d": {"unit": "Hrs", "pricePerUnit": {"USD": usd}}}}}}
    return json.dumps({"product": {"attributes": attributes}, "terms": terms})


def test_of_one_price_leaves_the_others(aws: AwsBackend, cloud: Cloud) -> None:
    listed = [product("g5.xlarge", usd) for usd in ("NaN", "Infinity", "-1", "dear", [], None)]
    listed += ["{oops", "null", "5", json.dumps({"product": 5}), product(["g5"], "1"), product("g5.2xlarge", "1.2")]
    cloud.answer("pricing", bodies=[json.dumps({"PriceList": [*listed, None, 5]})])
    prices = aws.fetch(SourceKey("prices", REGION))
    assert {name: str(price) for name, price in prices.items()} == {"g5.2xlarge": "1.2"}


def history(*prices: tuple[str, str]) -> str:
    rows = "".join(
        f"<item><instanceType>g5.xlarge</instanceType><spotPrice>{price}</spotPrice><timestamp>{at}</timestamp>"
        f"<availabilityZone>{REGION}{zone}</availabilityZone></item>"
        for zone, (price, at) in zip("abcdef", prices, strict=False)
    )
    set_ = f"<spotPriceHistorySet>{rows}<item/></spotPriceHistorySet>"
    return f"<DescribeSpotPriceHistoryResponse {XMLNS}>{set_}</DescribeSpotPriceHistoryResponse>"


def test_of_one_spot_price_leaves_the_others(aws: AwsBackend, cloud: Cloud) -> None:
    at = "2026-11-21T12:00:00.000Z"
    said = history(("NaN", at), ("-1", at), ("cheap", at), ("0.5", "yesterday"), ("0", at), ("0.4", at))
    cloud.answer("ec2", "DescribeSpotPriceHistory", bodies=[said])
    found = aws.fetch(SourceKey("spot_prices", REGION))
    assert {zone: str(price) for zone, price in found["g5.xlarge"].items()} == {"us-east-1f": "0.4"}


def types(*vcpus: str) -> str:
    rows = "".join(
        f"<item><instanceType>g5.{number}xlarge</instanceType><supportedUsageClasses><item>on-demand</item>"
        "</supportedUsageClasses><supportedVirtualizationTypes><item>hvm</item></supportedVirtualizationTypes>"
        "<processorInfo><supportedArchitectures><item>x86_64</item></supportedArchitectures></processorInfo>"
        f"{text}<memoryInfo><sizeInMiB>16384</sizeInMiB></memoryInfo></item>"
        for number, text in enumerate(vcpus)
    )
    set_ = f"<instanceTypeSet>{rows}<item/></instanceTypeSet>"
    return f"<DescribeInstanceTypesResponse {XMLNS}>{set_}</DescribeInstanceTypesResponse>"


def test_of_one_instance_type_leaves_the_others(aws: AwsBackend, cloud: Cloud) -> None:
    vcpus = ["", *(f"<vCpuInfo><defaultVCpus>{n}</defaultVCpus></vCpuInfo>" for n in ("many", "-4", "0", "4"))]
    offered = "".join(
        f"<item><instanceType>g5.{number}xlarge</instanceType><location>{REGION}a</location></item>"
        for number in range(len(vcpus))
    )
    offerings = f"<instanceTypeOfferingSet><item/>{offered}</instanceTypeOfferingSet>"
    said = f"<DescribeInstanceTypeOfferingsResponse {XMLNS}>{offerings}</DescribeInstanceTypeOfferingsResponse>"
    cloud.answer("ec2", "DescribeInstanceTypeOfferings", bodies=[said])
    cloud.answer("ec2", "DescribeInstanceTypes", bodies=[types(*vcpus)])
    found = aws.fetch(SourceKey("instance_types", REGION))
    assert {name: kind.cpus for name, kind in found.items()} == {"g5.4xlarge": 4}


def test_of_all_items_is_a_failed_answer(aws: AwsBackend, cloud: Cloud) -> None:
    cloud.answer("pricing", bodies=[json.dumps({"PriceList": ["{oops", "5", product("g5.xlarge", "dear")]})])
    failed = failure(aws, "prices")
    assert (failed.code, failed.data["what"]) == ("nonsense", "items")


@pytest.mark.both_sides
def test_that_empties_a_source_counts_only_when_it_comes_again(cached: Backend, cloud: Cloud, clock: Clock) -> None:
    sources.refresh_due(timezone.now())
    before = catalog.CachedDriver(cached).offers(GPU)
    cloud.forget_calls()
    cloud.answer("pricing", bodies=[json.dumps({"PriceList": []})])
    refresh(cached, clock)
    assert states(cached)["prices"] == (SourceState.FRESH, "emptied")
    assert catalog.CachedDriver(cached).offers(GPU) == before
    clock.pass_s(11)
    sources.refresh_due(clock.now)
    assert states(cached)["prices"] == (SourceState.FRESH, "")
    assert {offer.spot for offer in catalog.CachedDriver(cached).offers(GPU)} == {True}
    assert cloud.count("pricing") == 2


def test_of_the_sign_in_is_a_failed_answer(backend: Backend, cloud: Cloud) -> None:
    credentials = {**backend.config["credentials"], "role_arn": "arn:aws:iam::123456789012:role/gpus"}
    backend.config = {**backend.config, "credentials": credentials}
    aws = AwsBackend(backend)
    for body in BODIES.values():
        cloud.answer("sts", bodies=[body])
        assert failure(aws, "spot_prices").data["api"] == "sts:AssumeRole"
    cloud.answer_as_usual()
    assert aws.fetch(SourceKey("spot_prices", REGION))


def order() -> InstanceOrder:
    return InstanceOrder("6d9a4e58-4c5f-4f0c-8d53-b6ab5d6e44c1", "ours", REGION, "m7i.large", False, "#!/bin/sh\n")


class TestOfALaunch:
    def test_is_asked_again_and_finds_the_instance_that_was_launched(self, aws: AwsBackend, cloud: Cloud) -> None:
        launched = aws.launch(order())
        for body in BODIES.values():
            cloud.answer("ec2", "RunInstances", bodies=[body])
            cloud.answer("ec2", "DescribeInstances", bodies=[body])
            with pytest.raises(SourceFailed, match="nonsense"):
                aws.launch(order())
        cloud.answer_as_usual()
        assert aws.launch(order()).cloud_id == launched.cloud_id

    @pytest.mark.usefixtures("unlimited_launches")
    @pytest.mark.parametrize(("service", "action"), [("ec2", "RunInstances"), ("ec2", "DescribeImages"), ("ssm", "*")])
    def test_refuses_no_offer(self, aws: AwsBackend, cloud: Cloud, service: str, action: str) -> None:
        ami.forget()
        for body in BODIES.values():
            cloud.answer(service, action, bodies=[body])
            with pytest.raises(SourceFailed, match="nonsense"):
                aws.launch(order())
        cloud.answer_as_usual()
        assert aws.launch(order()).cloud_id.startswith("i-")
        assert len(cloud.machines()) == 1


@pytest.mark.both_sides
def test_about_instances_ends_none_and_terminates_no_orphan(cached: Backend, cloud: Cloud, project: Project) -> None:
    cached.config = {**cached.config, "families": ["m7i"]}
    launched = AwsBackend(cached).launch(order())
    row = Instance.objects.create(
        pk=launched.instance, backend=cached, project=project, region=REGION, instance_type="m7i.large",
        cloud_id=launched.cloud_id, status=InstanceStatus.RUNNING, silent_s=1e6, status_s=1e6,
    )  # fmt: skip
    nameless = "<reservationSet><item><instancesSet><item/></instancesSet></item></reservationSet>"
    for body in (*BODIES.values(), f"<DescribeInstancesResponse {XMLNS}>{nameless}</DescribeInstancesResponse>"):
        cloud.answer("ec2", bodies=[body])
        with pytest.raises(SourceFailed, match="nonsense"):
            watch.poll_region(cached, REGION)
        with pytest.raises(SourceFailed, match="nonsense"):
            AwsBackend(cached).terminate(REGION, [launched.cloud_id])
    row.refresh_from_db()
    assert row.status == InstanceStatus.RUNNING
    assert {machine["state"] for machine in cloud.machines()} <= {"pending", "running"}
