"""Offers from what is known of each region, against a naive reading of the same."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.backends.aws import config
from dstackweb.backends.aws.instance_types import InstanceType
from dstackweb.backends.aws.kind import AwsKind
from dstackweb.backends.aws.offers import join
from dstackweb.backends.aws.quotas import code_of
from dstackweb.backends.contract import Availability, Offer, SourceFailed, SourceKey, SourceReading, SourceState
from dstackweb.spec.effective import Requirements
from dstackweb.spec.mappings import ResourcesFields
from dstackweb.wording import offers as offer_words

NOW = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)
G, P, STANDARD = "L-DB2E81BA", "L-417A185B", "L-1216C47A"
SPOT_G = "L-3819A6DF"
ZONES = ("eu-west-1a", "eu-west-1b")


def kind(name: str, cpus: int, gib: int, gpu: str = "", count: int = 0, gpu_gib: int = 0, **more: Any) -> InstanceType:
    return InstanceType(
        name=name, architecture="x86_64", cpus=cpus, memory_mib=gib * 1024, gpu_name=gpu, gpu_count=count,
        gpu_memory_mib=gpu_gib * 1024, on_demand=True, spot=True, zones=more.pop("zones", ZONES),
    )  # fmt: skip


G5 = kind("g5.xlarge", 4, 16, "A10G", 1, 24)
G5_BIG = kind("g5.12xlarge", 48, 192, "A10G", 4, 24)
P4 = kind("p4d.24xlarge", 96, 1152, "A100", 8, 40, zones=("eu-west-1b",))
P6 = kind("p6-b200.48xlarge", 192, 2048, "B200", 8, 179)
M7 = kind("m7i.large", 2, 8)
TYPES = {one.name: one for one in (G5, G5_BIG, P4, P6, M7)}
PRICES = {"g5.xlarge": "1.006", "g5.12xlarge": "5.672", "p4d.24xlarge": "32.77", "p6-b200.48xlarge": "113.9",
          "m7i.large": "0.1"}  # fmt: skip
LIMITS, USE = {G: 64, P: 96, STANDARD: 5, SPOT_G: 0}, {G: 8, STANDARD: 4}


def fresh(value: object) -> SourceReading:
    return SourceReading(SourceState.FRESH, value, NOW)


def failed(code: str = "throttled", **data: Any) -> SourceReading:
    return SourceReading(SourceState.FAILED, error={"code": code, **data})


def known(region: str = "eu-west-1", **other: SourceReading) -> dict[SourceKey, SourceReading]:
    readings = {
        "instance_types": fresh(TYPES),
        "prices": fresh({name: Decimal(price) for name, price in PRICES.items()}),
        "spot_prices": fresh(
            {
                "g5.xlarge": {"eu-west-1a": Decimal("0.40"), "eu-west-1b": Decimal("0.38")},
                "p6-b200.48xlarge": {"eu-west-1a": Decimal("60")},
            }
        ),
        "quotas": fresh(LIMITS),
        "quota_use": fresh(USE),
        **other,
    }
    return {SourceKey(source, region): reading for source, reading in readings.items()}


def offers(readings: Mapping[SourceKey, SourceReading], asked: dict[str, Any], **how: Any) -> list[Offer]:
    said = {"regions": ["eu-west-1"], **how.pop("said", {})}
    needs = Requirements.of(ResourcesFields.model_validate(asked))
    return join(config.read(said), readings, needs, how.pop("own_use", {}), backend="cloud", **how)


def shown(found: list[Offer]) -> list[tuple[str, bool, str]]:
    return [(offer.instance_type, offer.spot, offer.availability.value) for offer in found]


def test_an_offer_shows_how_many_more_instances_its_quota_allows() -> None:
    found = {(offer.instance_type, offer.spot): offer for offer in offers(known(), {"gpu": "A10G"})}
    one = found["g5.xlarge", False]
    assert (one.availability, one.price, one.gpu_memory_mib) == (Availability.AVAILABLE, Decimal("1.006"), 24576)
    assert one.detail == {"code": "quota", "fits": 14, "limit": 64, "used": 8, "needs": 4}
    spot = found["g5.xlarge", True]
    zones = {"zone": "eu-west-1b", "zone_prices": {"eu-west-1b": "0.38", "eu-west-1a": "0.40"}}
    assert spot.detail == {"code": "no_quota", "fits": 0, "limit": 0, "used": 0, "needs": 4, **zones}
    assert list(spot.detail["zone_prices"]) == ["eu-west-1b", "eu-west-1a"]
    assert (spot.availability, spot.price) == (Availability.NO_QUOTA, Decimal("0.38"))


def test_a_count_is_that_of_the_whole_instance() -> None:
    assert shown(offers(known(), {"gpu": "A10G:4"})) == [("g5.12xlarge", False, "available")]
    assert shown(offers(known(), {"gpu": "A100:40GB:8"})) == [("p4d.24xlarge", False, "available")]
    assert offers(known(), {"gpu": "A100:80GB:8"}) == []
    assert [name for name, *_ in shown(offers(known(), {"gpu": 0}))] == ["m7i.large"]


def test_more_cpus_and_memory_than_asked_for_do_no_harm_and_more_gpus_do() -> None:
    assert shown(offers(known(), {"gpu": 0, "cpu": 1, "memory": "1GB"})) == [("m7i.large", False, "no_quota")]
    assert {name for name, *_ in shown(offers(known(), {"gpu": "A10G:1", "cpu": 2}))} == {"g5.xlarge"}
    assert offers(known(), {"gpu": "A100:1"}) == []


def test_gpus_that_no_public_image_has_a_driver_for_need_one_of_ones_own() -> None:
    p3 = kind("p3.2xlarge", 8, 61, "V100", 1, 16)
    readings = known(instance_types=fresh({p3.name: p3}), prices=fresh({p3.name: Decimal("3.06")}))
    (offer,) = offers(readings, {"gpu": "V100"})
    assert (offer.availability, offer.detail) == (Availability.NOT_AVAILABLE, {"code": "no_driver", "family": "p3"})
    assert "p3" in AwsKind().offer_detail(offer.detail)
    (offer,) = offers(readings, {"gpu": "V100"}, said={"ami": "ami-0000000000000000f"})
    assert offer.availability == Availability.AVAILABLE


def test_offers_are_sorted_by_price() -> None:
    found = offers(known(), {})
    assert [offer.price for offer in found] == sorted(offer.price for offer in found)
    assert found[0].instance_type == "m7i.large"


@pytest.mark.parametrize(
    ("quotas", "why"),
    [
        (failed("access_denied", action="servicequotas:ListServiceQuotas"), "access_denied"),
        (failed("throttled", until=NOW.isoformat()), "throttled"),
        (SourceReading(SourceState.FAILED), "not_asked"),
        (fresh({P: 0}), "not_listed"),
    ],
)
def test_a_quota_that_could_not_be_read_is_unknown_and_never_a_lack_of_it(quotas: SourceReading, why: str) -> None:
    (one, *_) = offers(known(quotas=quotas), {"gpu": "A10G:4"})
    assert (one.availability, one.detail) == (Availability.UNKNOWN, {"code": "quota_unknown", "why": why})


def test_an_old_quota_is_better_than_none() -> None:
    stale = SourceReading(SourceState.STALE, LIMITS, NOW, {"code": "throttled"})
    assert offers(known(quotas=stale), {"gpu": "A10G:4"})[0].availability is Availability.AVAILABLE


def test_own_instances_use_a_quota_at_once_and_others_when_they_were_read() -> None:
    assert offers(known(), {"gpu": "A10G:4"})[0].detail["used"] == 8
    (busy,) = offers(known(), {"gpu": "A10G:4"}, own_use={"eu-west-1": {G: 16}, "us-east-1": {G: 40}})
    assert (busy.availability, busy.detail["used"]) == (Availability.NO_QUOTA, 24)


def test_an_unknown_use_of_a_quota_is_not_zero_and_too_low_a_limit_is_known_without_it() -> None:
    readings = known(quota_use=failed("access_denied", action="ec2:DescribeInstances"))
    (one,) = offers(readings, {"gpu": "A10G:4"})
    numbers = {"limit": 64, "used": None, "needs": 48}
    assert one.availability is Availability.UNKNOWN
    assert one.detail == {"code": "quota_use_unknown", "why": "access_denied", **numbers}
    (spot,) = [offer for offer in offers(readings, {"gpu": "A10G:1"}) if offer.spot]
    assert (spot.availability, spot.detail["used"]) == (Availability.NO_QUOTA, None)
    assert "None" not in "".join(AwsKind().offer_detail(offer.detail) for offer in (one, spot))


def test_types_that_the_settings_allow_no_more_are_no_offers_though_they_are_known() -> None:
    assert {offer.instance_type for offer in offers(known(), {}, said={"families": ["g5"]})} == set(TYPES) - {
        "p4d.24xlarge", "p6-b200.48xlarge", "m7i.large",
    }  # fmt: skip
    assert offers(known(), {}, said={"architectures": ["arm64"]}) == []


def test_where_no_spot_quota_is_documented_for_a_family_it_is_unknown() -> None:
    (spot,) = [offer for offer in offers(known(), {"gpu": "B200:8"}) if offer.spot]
    assert (spot.availability, spot.detail["why"]) == (Availability.UNKNOWN, "not_documented")


def test_a_type_that_no_zone_of_the_subnets_has_is_not_available_there() -> None:
    said = {"subnets": ["subnet-1"]}
    (p4,) = offers(known(subnets=fresh({"subnet-1": "eu-west-1a"})), {"gpu": "A100:8"}, said=said)
    assert p4.availability is Availability.NOT_AVAILABLE
    assert p4.detail == {"code": "not_in_zone", "zones": ["eu-west-1a"], "offered_in": ["eu-west-1b"]}
    found = offers(known(subnets=fresh({"subnet-1": "eu-west-1a"})), {"gpu": "A10G:1"}, said=said)
    assert [(offer.price, offer.detail.get("zone")) for offer in found] == [
        (Decimal("0.40"), "eu-west-1a"),
        (Decimal("1.006"), None),
    ]
    (unknown,) = offers(known(subnets=failed()), {"gpu": "A100:8"}, said=said)
    assert (unknown.availability, unknown.detail["code"]) == (Availability.UNKNOWN, "subnets_unknown")


def test_nothing_is_available_where_instances_could_not_reach_this_server_or_run_the_image() -> None:
    for how, code in (
        ({"url_problem": "missing"}, "public_url"),
        ({"image": "python", "said": {"containers": False}}, "image_not_supported"),
    ):
        found = offers(known(), {}, **how)
        assert {offer.availability for offer in found} == {Availability.NOT_AVAILABLE}
        assert {offer.detail["code"] for offer in found} == {code}
        assert len(found) == len(offers(known(), {}))
    assert offers(known(), {}, image="python") == offers(known(), {})


def test_the_quota_stays_visible_where_instances_could_not_reach_this_server() -> None:
    usual = offers(known(), {})
    found = offers(known(), {}, url_problem="missing")
    assert [offer.detail["quota"]["code"] for offer in found] == [offer.detail["code"] for offer in usual]
    assert found[0].detail["quota"].items() <= usual[0].detail.items()
    assert "vCPUs in use" in offer_words.why(dataclasses.replace(found[0], kind="aws"), Requirements())


def test_a_type_without_a_price_is_no_offer() -> None:
    assert shown(offers(known(prices=fresh({"g5.xlarge": Decimal(1)})), {"gpu": "A10G"})) == [
        ("g5.xlarge", True, "no_quota"),
        ("g5.xlarge", False, "available"),
    ]


def test_a_type_that_is_not_sold_on_demand_has_no_such_offer() -> None:
    only_spot = {"g5.xlarge": dataclasses.replace(G5, on_demand=False)}
    assert shown(offers(known(instance_types=fresh(only_spot)), {"gpu": "A10G"})) == [("g5.xlarge", True, "no_quota")]


def test_a_region_without_data_does_not_affect_the_others() -> None:
    said = {"regions": ["us-east-1", "eu-west-1"]}
    assert {offer.region for offer in offers(known(), {"gpu": "A10G"}, said=said)} == {"eu-west-1"}


@pytest.mark.parametrize("source", ["instance_types", "prices", "spot_prices"])
def test_no_offers_while_something_is_unknown_is_a_failure_and_not_an_empty_list(source: str) -> None:
    readings = known(**{source: failed("access_denied", action="x:Y")})
    with pytest.raises(SourceFailed) as raised:
        offers(readings, {"gpu": "GH200"})
    assert raised.value.code == "access_denied"
    assert raised.value.data == {"source": source, "region": "eu-west-1", "action": "x:Y"}
    with pytest.raises(SourceFailed) as raised:
        offers({}, {})
    assert raised.value.code == "not_asked"


def test_complete_data_without_a_match_is_an_empty_list() -> None:
    assert offers(known(), {"gpu": "GH200"}) == []


# Against a naive reading.

NAMES = ["g5.xlarge", "g5.2xlarge", "p4d.24xlarge", "p5.48xlarge", "p6-b200.48xlarge", "m7i.large", "mac2.metal"]
REGIONS = ["eu-west-1", "us-east-1"]
money = st.decimals(min_value=Decimal("0.01"), max_value=2, places=2)
kinds = st.builds(
    InstanceType,
    name=st.just(""),
    architecture=st.just("x86_64"),
    cpus=st.sampled_from([2, 4, 8]),
    memory_mib=st.sampled_from([1024, 4096, 16384]),
    gpu_name=st.sampled_from(["A100", "A10G"]),
    gpu_count=st.integers(0, 3),
    gpu_memory_mib=st.sampled_from([24576, 40960, 81920]),
    on_demand=st.booleans(),
    spot=st.booleans(),
    zones=st.sets(st.sampled_from("ab"), min_size=1).map(lambda zones: tuple(sorted(zones))),
)
codes = {code for name in NAMES for spot in (True, False) if (code := code_of(name, spot=spot))}
vcpus = st.dictionaries(st.sampled_from(sorted(codes)), st.integers(0, 20))
requirements = st.builds(
    Requirements,
    cpu_min=st.integers(1, 8),
    cpu_max=st.none() | st.integers(4, 8),
    memory_min_mib=st.sampled_from([256, 4096]),
    memory_max_mib=st.none() | st.sampled_from([4096, 16384]),
    gpu_count_min=st.integers(0, 3),
    gpu_count_max=st.none() | st.integers(0, 3),
    gpu_names=st.sampled_from([(), ("A100",), ("a100", "A10G")]),
    gpu_memory_min_mib=st.none() | st.just(40960),
    gpu_memory_max_mib=st.none() | st.just(40960),
)


def readings_of(value: st.SearchStrategy[Any]) -> st.SearchStrategy[SourceReading]:
    return st.just(failed()) | value.map(fresh)


regions = st.fixed_dictionaries(
    {
        "instance_types": readings_of(
            st.dictionaries(st.sampled_from(NAMES), kinds).map(
                lambda found: {name: dataclasses.replace(one, name=name) for name, one in found.items()}
            )
        ),
        "prices": readings_of(st.dictionaries(st.sampled_from(NAMES), money)),
        "spot_prices": readings_of(
            st.dictionaries(st.sampled_from(NAMES), st.dictionaries(st.sampled_from("ab"), money, min_size=1))
        ),
        "quotas": readings_of(vcpus),
        "quota_use": readings_of(vcpus),
    }
)


@given(
    st.fixed_dictionaries(dict.fromkeys(REGIONS, regions)),
    requirements,
    st.fixed_dictionaries(dict.fromkeys(REGIONS, vcpus)),
)
def test_offers_are_those_of_a_naive_reading(
    found: dict[str, dict[str, SourceReading]], needs: Requirements, own: dict[str, dict[str, int]]
) -> None:
    readings = {SourceKey(source, region): one for region, of in found.items() for source, one in of.items()}
    read = config.read({"regions": REGIONS})
    expected = sorted(naive(found, needs, own))
    try:
        got = join(read, readings, needs, own, backend="cloud")
    except SourceFailed:
        parts = [found[region][source] for region in REGIONS for source in ("instance_types", "prices", "spot_prices")]
        assert not expected
        assert any(reading.value is None for reading in parts)
        return
    keys = [(offer.price, offer.region, offer.instance_type, offer.spot) for offer in got]
    assert keys == sorted(keys)
    fits = [offer.detail.get("fits", -1) for offer in got]
    rows = zip(keys, fits, (offer.availability.value for offer in got), strict=True)
    assert [(*key, fit, how) for key, fit, how in rows] == expected


def naive(
    found: dict[str, dict[str, SourceReading]], needs: Requirements, own: dict[str, dict[str, int]]
) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for region, of in found.items():
        for name, one in (of["instance_types"].value or {}).items():
            if one.cpus < needs.cpu_min or one.memory_mib < needs.memory_min_mib:
                continue
            if one.gpu_count < needs.gpu_count_min:
                continue
            if needs.gpu_count_max is not None and one.gpu_count > needs.gpu_count_max:
                continue
            if needs.gpu_count_min > 0:
                if needs.gpu_names and one.gpu_name.lower() not in [asked.lower() for asked in needs.gpu_names]:
                    continue
                if needs.gpu_memory_min_mib and one.gpu_memory_mib < needs.gpu_memory_min_mib:
                    continue
                if needs.gpu_memory_max_mib and one.gpu_memory_mib > needs.gpu_memory_max_mib:
                    continue
            prices = dict[bool, Decimal]()
            if one.on_demand and name in (of["prices"].value or {}):
                prices[False] = of["prices"].value[name]
            if one.spot and name in (of["spot_prices"].value or {}):
                by_zone = of["spot_prices"].value[name]
                prices[True] = min([by_zone[z] for z in by_zone if z in one.zones] or by_zone.values())
            for spot, price in prices.items():
                code = code_of(name, spot=spot)
                limit, others = (of["quotas"].value or {}).get(code), of["quota_use"].value
                fits, how = -1, "unknown"
                if limit is not None and (others is not None or one.cpus > limit):
                    fits = 0
                    used = (others or {}).get(code, 0) + own[region].get(code, 0)
                    while used + (fits + 1) * one.cpus <= limit:
                        fits += 1
                    how = "available" if fits else "no_quota"
                rows.append((price, region, name, spot, fits, how))
    return rows
