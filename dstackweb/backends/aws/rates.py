"""How often AWS is asked at most, by all processes together: for each account, region and API.

Half of what AWS documents, so that the account's other programs have theirs: 20 a second and 100 at once for what reads
in EC2, 2 a second and 5 at once for RunInstances, 5 a second and 100 at once for TerminateInstances
(https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html), 10 a second and as many more at once for
ListServiceQuotas (https://docs.aws.amazon.com/servicequotas/latest/userguide/reference_limits.html). Of the others
nothing is documented.
"""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """Calls a second, and how many may come at once."""

    per_s: float
    burst: float


RATES = {
    "ec2": Rate(10, 50),
    "ec2.RunInstances": Rate(1, 3),
    "ec2.TerminateInstances": Rate(2.5, 50),
    "service-quotas": Rate(5, 5),
    "pricing": Rate(5, 10),
}
OTHERS = Rate(5, 10)


def rate_of(api: str) -> Rate:
    """The rate of an API, such as `ec2.RunInstances`: its own, or that of each of its service."""
    return RATES.get(api) or RATES.get(api.partition(".")[0], OTHERS)
