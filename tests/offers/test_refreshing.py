"""A refresh by hand: everything is due at once."""

from __future__ import annotations

from typing import Any

import pytest

from dstackweb.backends import registry
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid
from dstackweb.offers import listing, source_rows, sources
from dstackweb.offers.listing import Filter
from tests.offers.cloud_stub import TYPES, Clock

pytestmark = pytest.mark.django_db


@pytest.mark.django_db(transaction=True)
def test_a_manual_refresh_makes_fresh_sources_due(backend: Backend, clock: Clock) -> None:
    sources.refresh(backend, TYPES)
    read_at = clock.now
    clock.pass_s(source_rows.REFRESH_EVERY_S)
    sources.refresh_now(backend)
    ages = source_rows.of_backends(sources.sourced_backends(), clock.now)
    (age,) = [age for age in ages if (age.source, age.region) == TYPES]
    assert (age.state, age.requested, age.due_at, age.fetched_at) == ("fresh", True, None, read_at)


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
