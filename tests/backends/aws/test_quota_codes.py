"""Which quota an instance type counts against."""

from __future__ import annotations

import pytest

from dstackweb.backends.aws.quotas import code_of


@pytest.mark.parametrize(
    ("instance_type", "on_demand", "spot"),
    [
        ("m7i.large", "L-1216C47A", "L-34B43A08"),
        ("t3a.micro", "L-1216C47A", "L-34B43A08"),
        ("im4gn.large", "L-1216C47A", "L-34B43A08"),
        ("g6e.xlarge", "L-DB2E81BA", "L-3819A6DF"),
        ("gr6.4xlarge", "L-DB2E81BA", "L-3819A6DF"),
        ("vt1.3xlarge", "L-DB2E81BA", "L-3819A6DF"),
        ("p3dn.24xlarge", "L-417A185B", "L-7212CCBC"),
        ("p4de.24xlarge", "L-417A185B", "L-7212CCBC"),
        ("p5.4xlarge", "L-417A185B", "L-C4BD4855"),
        ("p5en.48xlarge", "L-417A185B", "L-C4BD4855"),
        ("p6-b200.48xlarge", "L-417A185B", None),
        ("inf2.xlarge", "L-1945791B", "L-B5D1601B"),
        ("trn2.48xlarge", "L-2C3B7624", "L-6B0D517C"),
        ("dl1.24xlarge", "L-6E869C2A", "L-85EED4F7"),
        ("f2.6xlarge", "L-74FC7D96", "L-88CF9481"),
        ("x2iedn.xlarge", "L-7295265B", "L-E3A00192"),
        ("u-6tb1.112xlarge", "L-43DA4232", None),
        ("u7in-16tb.224xlarge", "L-43DA4232", None),
        ("hpc7a.12xlarge", "L-F7808C92", None),
        ("mac2.metal", None, None),
        ("q1.large", None, None),
    ],
)
def test_a_family_counts_against_its_own_quota(instance_type: str, on_demand: str | None, spot: str | None) -> None:
    assert code_of(instance_type, spot=False) == on_demand
    assert code_of(instance_type, spot=True) == spot
