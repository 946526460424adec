"""A refresh by hand: each backend once in ten seconds, and everything is due at once."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.backends import registry
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid, TooMany
from dstackweb.offers import listing, source_rows, sources
from dstackweb.offers.listing import Filter
from tests.offers.cloud_stub import TYPES, Clock

pytestmark = pytest.mark.django_db


def test_a_repeated_manual_refresh_is_refused_with_the_remaining_wait(
    backend: Backend, plain: Backend, clock: Clock
) -> None:
    assert listing.refresh([backend], clock.now) == [backend]
    clock.pass_s(3)
    assert listing.refresh([backend, plain], clock.now) == [plain]
    with pytest.raises(TooMany) as refused:
        listing.refresh([backend, plain], clock.now)
    assert refused.value.retry_after == pytest.approx(7)
    clock.pass_s(7)
    assert listing.refresh([backend], clock.now) == [backend]
    assert listing.refresh([], clock.now) == []


@pytest.mark.django_db(transaction=True)
def test_a_manual_refresh_makes_fresh_sources_due(backend: Backend, clock: Clock) -> None:
    sources.refresh(backend, TYPES)
    listing.refresh([backend], clock.now)
    ages = source_rows.of_backends(sources.sourced_backends(), clock.now)
    (age,) = [age for age in ages if (age.source, age.region) == TYPES]
    assert (age.state, age.due_at, age.fetched_at) == ("stale", None, clock.now)


@pytest.mark.django_db(transaction=True)
def test_a_misconfigured_backend_does_not_block_the_others(
    backend: Backend, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Backend.objects.create(name="wrong", kind="aws")
    kind = registry.KINDS["aws"].driver_class
    wanted = kind.wanted

    def wanted_unless_wrong(self: Any) -> Any:
        if self.backend.pk == wrong.pk:
            raise Invalid("`regions` is missing")
        return wanted(self)

    monkeypatch.setattr(kind, "wanted", wanted_unless_wrong)
    assert sources.refresh_due(clock.now) == 3
    assert {age.backend for age in source_rows.of_backends(sources.sourced_backends(), clock.now)} == {"cloud"}
    found = {age.backend: (age.source, age.error) for age in listing.find_offers(Filter(), clock.now).sources}
    assert found["wrong"] == ("offers", {"code": "failed", "text": "`regions` is missing"})
