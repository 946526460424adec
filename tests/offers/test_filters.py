"""Which offers are shown, and in which order: what is read from text, and pages against a naive oracle."""

from __future__ import annotations

import base64
import json
from decimal import Decimal

import pytest
from django.utils import translation
from hypothesis import given, strategies as st

from dstackweb.backends.contract import Availability, Offer
from dstackweb.lib.errors import Invalid
from dstackweb.offers import listing
from dstackweb.offers.listing import SORTS, Filter, Order
from dstackweb.spec.effective import Requirements

NAMES = st.sampled_from(["", "eu", "eu-west-1", "us", "us-east-1"])
OFFERS = st.builds(
    Offer,
    backend=st.sampled_from(["aws", "aws-2", "hosts"]),
    instance_type=st.text("abz-", max_size=4),
    cpus=st.integers(0, 3),
    memory_mib=st.integers(0, 3),
    availability=st.sampled_from(Availability),
    region=NAMES,
    gpu_name=st.sampled_from(["", "A10G", "A100", "A1"]),
    gpu_count=st.integers(0, 3),
    gpu_memory_mib=st.integers(0, 2),
    spot=st.booleans(),
    price=st.decimals(0, 3, places=1),
    detail=st.sampled_from([{}, {"instance": "one"}, {"instance": "two"}]),
)
ORDERS = st.builds(Order, st.sampled_from(sorted(SORTS)), st.booleans())


def identity(offer: Offer) -> tuple[object, ...]:
    found = (offer.price, offer.backend, offer.region, offer.instance_type, offer.spot)
    return *found, offer.detail.get("instance", "")


ALL = st.lists(OFFERS, max_size=12, unique_by=identity)


def naive(offers: list[Offer], order: Order) -> list[Offer]:
    """What the order is: by its value, those without one last, and equal ones by what they are."""
    value = SORTS[order.by]
    known = [offer for offer in offers if value(offer) is not None]
    unknown = [offer for offer in offers if value(offer) is None]
    known.sort(key=identity)
    known.sort(key=value, reverse=order.descending)  # type: ignore[arg-type]  # a stable sort
    return known + sorted(unknown, key=identity)


@given(ALL, ORDERS)
def test_the_order_is_the_naive_one(offers: list[Offer], order: Order) -> None:
    assert listing.page(offers, order, 100) == (naive(offers, order), None)


@given(ALL, ORDERS, st.integers(1, 5))
def test_pages_make_the_whole_list(offers: list[Offer], order: Order, limit: int) -> None:
    seen: list[Offer] = []
    cursor: str | None = ""
    while cursor is not None:
        items, cursor = listing.page(offers, order, limit, cursor)
        assert len(items) <= limit
        seen += items
    assert seen == naive(offers, order)


@given(ALL, ORDERS, st.integers(1, 5), st.data())
def test_a_cursor_stays_valid_while_offers_change(
    offers: list[Offer], order: Order, limit: int, data: st.DataObject
) -> None:
    items, cursor = listing.page(offers, order, limit)
    if cursor is None:
        return
    staying = [offer for offer in offers if data.draw(st.booleans())]
    following, _ = listing.page(staying, order, 100, cursor)
    assert following == [offer for offer in naive(staying, order) if offer not in items]


@given(
    ALL,
    st.lists(NAMES, max_size=2),
    st.lists(st.sampled_from(["aws", "hosts", "none"]), max_size=2),
    st.sampled_from([None, True, False]),
    st.none() | st.decimals(0, 3, places=1),
)
def test_the_filter_selects_the_same_offers_as_a_naive_one(
    offers: list[Offer], regions: list[str], backends: list[str], spot: bool | None, most: Decimal | None
) -> None:
    wanted = Filter(regions=tuple(regions), backends=tuple(backends), spot=spot, max_price=most)
    expected = []
    for offer in offers:
        if regions and offer.region not in regions:
            continue
        if backends and offer.backend not in backends:
            continue
        if spot is not None and offer.spot != spot:
            continue
        if most is not None and offer.price > most:
            continue
        expected.append(offer)
    assert [offer for offer in offers if wanted.takes(offer)] == expected


def test_requirements_are_parsed_as_in_a_run_file() -> None:
    read = listing.read_filter(gpu="A100:40GB..:1..", cpu="4..", memory="16GB", spot="on-demand", max_price="2.5")
    assert read.requirements == Requirements(
        cpu_min=4, memory_min_mib=16384, memory_max_mib=16384,
        gpu_names=("A100",), gpu_memory_min_mib=40960, gpu_count_min=1,
    )  # fmt: skip
    assert (read.spot, read.max_price) == (False, Decimal("2.5"))
    assert listing.read_filter() == Filter()


def test_names_may_be_repeated_or_separated_by_commas() -> None:
    read = listing.read_filter(regions=["eu-west-1,us-east-1", "eu-west-1", ""], backends=["aws , hosts"])
    assert (read.regions, read.backends) == (("eu-west-1", "us-east-1"), ("aws", "hosts"))


@pytest.mark.parametrize("name", ["gpu", "regions", "backends"])
def test_no_more_names_than_a_run_may_have(name: str) -> None:
    """Each is compared with every offer."""
    many = ",".join(f"n{number}" for number in range(101))
    with pytest.raises(Invalid, match="has more than"):
        listing.read_filter(**{name: many if name == "gpu" else [many]})  # type: ignore[arg-type]


def test_all_invalid_parameters_are_reported_with_their_locations() -> None:
    with pytest.raises(Invalid) as refused:
        listing.read_filter(gpu="A100:x..", cpu="many", spot="maybe", max_price="-1", within=("query",))
    assert [error["loc"] for error in refused.value.errors] == [
        ["query", "cpu"], ["query", "gpu"], ["query", "spot"], ["query", "max_price"],
    ]  # fmt: skip


def test_what_is_invalid_is_said_in_the_readers_language() -> None:
    many = [",".join(f"n{number}" for number in range(101))]
    with translation.override("zh-hans"), pytest.raises(Invalid) as refused:
        listing.read_filter(spot="maybe", max_price="much", regions=many)
    assert [error["msg"] for error in refused.value.errors] == [
        "`spot` 应为 true、false 或 auto，而不是 'maybe'",
        "`max_price` 应为每小时的美元数，如 2.50，而不是 'much'",
        "`region` 的名称超过 100 个",
    ]


@pytest.mark.parametrize("price", ["NaN", "inf", "1e3", "1,5", "٣", "9" * 9, "-0"])
def test_a_price_is_a_plain_number(price: str) -> None:
    with pytest.raises(Invalid):
        listing.read_filter(max_price=price)


@pytest.mark.parametrize(
    ("text", "order"), [("", Order()), ("-memory", Order("memory", True)), (" region ", Order("region"))]
)
def test_an_order_is_a_name_with_a_dash_for_the_largest_first(text: str, order: Order) -> None:
    assert listing.read_order(text) == order


@pytest.mark.parametrize("text", ["colour", "--price", "price,region"])
def test_an_unknown_order_is_refused(text: str) -> None:
    with pytest.raises(Invalid) as refused:
        listing.read_order(text, within=("query",))
    assert refused.value.errors[0]["loc"] == ["query", "sort"]


def of(said: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "cursor",
    [
        "x", "ä", "=", of(7), of([]), of(["price", "1", "1", "a", "b", "c", 0, ""]), "A" * 4000,
        of(["-price", "1", "1", "a", "b", "c", False, ""]), of(["price", "NaN", "1", "a", "b", "c", False, ""]),
        of(["price", "1e999999999", "1", "a", "b", "c", False, ""]), of(["price", "1", "1", 5, "b", "c", False, ""]),
        of(["price", [], "1", "a", "b", "c", False, ""]),
    ],
)  # fmt: skip
def test_a_cursor_of_another_order_is_refused(cursor: str) -> None:
    with pytest.raises(Invalid) as refused:
        listing.page([], Order(), 5, cursor)
    assert refused.value.errors[0]["loc"] == ["cursor"]
