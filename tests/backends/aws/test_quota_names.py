"""Each quota that is read has AWS's own name."""

from __future__ import annotations

from dstackweb.backends import registry
from dstackweb.backends.aws import quotas
from standins.aws.quotas import ON_DEMAND, SPOT


def test_every_quota_that_is_read_has_its_name() -> None:
    assert set(quotas.NAMES) == {code for group in quotas.GROUPS for code in (group.on_demand, group.spot) if code}
    assert registry.KINDS["aws"].quota_name("L-00000000") == "L-00000000"


def test_names_are_those_that_service_quotas_gives() -> None:
    given = {code: name for code, name, _ in (*ON_DEMAND.values(), *SPOT.values())}
    assert {code: quotas.NAMES[code] for code in given if code in quotas.NAMES} == given
