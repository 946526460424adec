"""Which of several offers a run takes."""

from __future__ import annotations

import pytest

from dstackweb.backends.contract import Hidden, PlaceCode
from dstackweb.scheduler.placement.offers import (
    BackendOffers,
    OfferPlacement,
    choose_offers,
    matching_idle,
    may_miss,
    refusal,
)
from dstackweb.spec.effective import EffectiveSpec
from tests.scheduler.passes.backend_offers_stub import offer

KEPT = "8e0ad5d5-4f3b-4dd0-a3f6-0a0c0a5f3b4d"


@pytest.mark.parametrize(("new", "taken"), [("0.20", KEPT), ("0.10", KEPT), ("0.09", "")])
def test_an_idle_instance_is_preferred_unless_a_new_one_costs_less_than_half(new: str, taken: str) -> None:
    kept = offer("0.20", instance_type="m5.xlarge", detail={"code": "idle_instance", "instance": KEPT})
    asked = BackendOffers((offer(new, instance_type="m5.large"), kept), {})
    found = choose_offers(EffectiveSpec(commands=("true",), backends=("cloud",)), asked, {})
    assert isinstance(found, OfferPlacement)
    assert [one.detail.get("instance", "") for one in found.offers] == [taken]


@pytest.mark.parametrize(
    ("backends", "price", "why"),
    [
        (None, "0.01", PlaceCode.NOT_NAMED),
        (("other",), "0.01", PlaceCode.NOT_NAMED),
        (("cloud",), "0.01", None),
        (None, "0", None),
    ],
)
def test_paid_offers_are_excluded_unless_the_run_names_their_backend(
    backends: tuple[str, ...] | None, price: str, why: PlaceCode | None
) -> None:
    """Whatever its kind of backend says about costs."""
    assert refusal(EffectiveSpec(commands=("true",), backends=backends), offer(price)) == why


def test_an_image_goes_to_idle_instances_that_run_containers_and_a_volume_to_none() -> None:
    able, other = (
        offer("0.20", instance_type=name, detail={"code": "idle_instance", "instance": name, "runs_images": runs})
        for name, runs in (("a", True), ("b", False))
    )
    spec = EffectiveSpec(commands=("true",), image="tool:1", backends=("cloud",))
    assert matching_idle((able, other), spec.requirements, image=spec.image) == (able,)
    assert matching_idle((able, other), spec.requirements) == (able, other)
    mounts = spec.model_copy(update={"volumes": ("/data:/data",)})
    assert (refusal(spec, able), refusal(mounts, able)) == (None, PlaceCode.VOLUME_NOT_LISTED)


@pytest.mark.parametrize(
    ("spot_policy", "hides", "misses"),
    [
        ("on-demand", "all", True), ("on-demand", "on-demand", True), ("on-demand", "spot", False),
        ("spot", "all", True), ("spot", "on-demand", False), ("spot", "spot", True),
        ("auto", "on-demand", True), ("auto", "spot", True), ("auto", "none", False), ("spot", "none", False),
    ],
)  # fmt: skip
def test_a_run_misses_unread_offers_of_its_regions_and_pricing(spot_policy: str, hides: str, misses: bool) -> None:
    found = [
        may_miss(EffectiveSpec(spot_policy=spot_policy, regions=regions), region, Hidden(hides))
        for regions in (None, ("eu", "us"), ("us",))
        for region in ("", "eu")
    ]
    assert found == [misses, misses, misses, misses, misses, False]
