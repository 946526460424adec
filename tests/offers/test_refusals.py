"""What clouds refused: for each zone and size by itself, and by each process while the cache is down."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.core.cache import caches
from django.utils import timezone

from dstackweb.backends.contract import Availability, LaunchFailed, LaunchFailure, Offer
from dstackweb.backends.models import Backend, Instance
from dstackweb.offers import refusals, store

pytestmark = pytest.mark.django_db

SIZE = {"cpus": 4, "memory_mib": 16384}


@pytest.fixture
def backend() -> Backend:
    return Backend.objects.create(name="aws", kind="aws")


def ordered(backend: Backend, **more: Any) -> Instance:
    return Instance(backend=backend, **{"region": "eu", "instance_type": "m5", **SIZE, **more})


def shown(backend: Backend, **more: Any) -> Offer:
    values = {"region": "eu", "availability": Availability.AVAILABLE, **SIZE, **more}
    (offer,) = refusals.mark_refused(backend, (Offer("aws", "m5", **values),))
    return offer


def refuse(instance: Instance, code: str = "no_capacity", **data: Any) -> None:
    refusals.remember_refusal(instance, LaunchFailed(LaunchFailure(code), "full", **data))


def test_a_refusal_counts_for_its_region_size_and_market_alone(backend: Backend) -> None:
    refuse(ordered(backend))
    assert shown(backend).availability == "busy"
    for more in ({"region": "us"}, {"cpus": 8}, {"spot": True}):
        assert shown(backend, **more).availability == "available"


def test_other_settings_of_the_backend_forget_it(backend: Backend) -> None:
    refuse(ordered(backend))
    backend.version += 1
    assert shown(backend).availability == "available"


def test_an_offer_that_is_not_available_anyway_keeps_its_reason(backend: Backend) -> None:
    refuse(ordered(backend))
    detail = {"code": "no_driver"}
    assert shown(backend, availability=Availability.NOT_AVAILABLE, detail=detail).detail == detail


def test_a_launch_ends_it(backend: Backend) -> None:
    refuse(ordered(backend))
    refusals.remember_launch(ordered(backend), "")
    assert (shown(backend).availability, shown(backend).detail) == ("available", {})
    assert refusals.RecentAnswers(backend).is_launching(refusals.OfferKey.of(ordered(backend)))


def test_a_refusal_of_one_zone_leaves_the_others(backend: Backend) -> None:
    refuse(ordered(backend, is_spot=True, zone_prices={"a": "1", "b": "2"}), zone="a", elsewhere=True)
    offer = shown(backend, spot=True, detail={"zone": "a", "zone_prices": {"a": "1", "b": "2"}})
    assert (offer.availability, offer.price, offer.detail["zone_prices"]) == ("available", 2, {"b": "2"})
    assert refusals.RecentAnswers(backend).full_zones(refusals.OfferKey.of(offer)) == ("a",)


def test_a_launch_in_a_zone_right_after_one_in_another_ends_the_refusal_there(backend: Backend) -> None:
    instance = ordered(backend, is_spot=True, zone_prices={"a": "1", "b": "2"})
    refuse(instance, zone="a", elsewhere=True)
    refusals.remember_launch(instance, "b")
    refusals.remember_launch(instance, "a")
    assert refusals.RecentAnswers(backend).full_zones(refusals.OfferKey.of(instance)) == ()


def test_after_a_minute_it_is_on_trial_and_after_an_hour_forgotten(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(ordered(backend))
    now = timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: now + dt.timedelta(seconds=61))
    assert (shown(backend).availability, shown(backend).detail) == ("available", {"on_trial": True})
    monkeypatch.setattr(timezone, "now", lambda: now + dt.timedelta(seconds=refusals.REMEMBERED_S + 1))
    assert shown(backend).detail == {}


def test_one_from_the_future_was_written_before_a_clock_was_set_back(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(ordered(backend))
    now = timezone.now()
    monkeypatch.setattr(timezone, "now", lambda: now - dt.timedelta(hours=1))
    assert shown(backend).availability == "available"


def test_while_the_cache_is_down_a_process_knows_what_it_was_answered_itself(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*args: Any, **more: Any) -> None:
        raise OSError("away")

    monkeypatch.setattr(type(caches["offers"]), "get", away)
    monkeypatch.setattr(type(caches["offers"]), "set", away)
    refuse(ordered(backend))
    assert store.is_down()
    assert shown(backend).availability == "busy"
    refusals.forget()  # as another process
    assert shown(backend).availability == "available"
