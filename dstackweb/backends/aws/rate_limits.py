"""How often AWS is asked at most, by all processes together: for each account, region and API.

Half of what AWS documents, so that the account's other programs have theirs: 20 a second and 100 at once for what reads
in EC2, 2 a second and 5 at once for RunInstances, 5 a second and 100 at once for TerminateInstances
(https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html), 10 a second and as many more at once for
ListServiceQuotas (https://docs.aws.amazon.com/servicequotas/latest/userguide/reference_limits.html). Of the others
nothing is documented.
"""

from __future__ import annotations

import datetime as dt
from typing import NamedTuple

from dstackweb.backends.kinds import ApiUsage
from dstackweb.lib.models import CAP_S, Bucket, Circuit, room


class RateLimit(NamedTuple):
    """Calls a second, and how many may come at once."""

    per_s: float
    burst: float


RATES = {
    "ec2": RateLimit(10, 50),
    "ec2.RunInstances": RateLimit(1, 3),
    "ec2.TerminateInstances": RateLimit(2.5, 50),
    "service-quotas": RateLimit(5, 5),
    "pricing": RateLimit(5, 10),
}
OTHERS = RateLimit(5, 10)


def rate_of(api: str) -> RateLimit:
    """The rate of an API, such as `ec2.RunInstances`: its own, or that of each of its service."""
    return RATES.get(api) or RATES.get(api.partition(".")[0], OTHERS)


def api_usage(now: dt.datetime) -> list[ApiUsage]:
    """Of all APIs that were ever called, by name and region."""
    opened = {
        row.name: row.open_until
        for row in Circuit.objects.filter(name__startswith="aws:", open_until__gt=now)
        if row.open_until is not None and row.open_until <= now + dt.timedelta(seconds=CAP_S)
    }
    now_us = round(now.timestamp() * 1e6)
    worst: dict[tuple[str, str], ApiUsage] = {}
    for bucket in Bucket.objects.filter(name__startswith="aws:"):
        _aws, _account, region, api = bucket.name.split(":", 3)
        rate = rate_of(api)
        left = room(bucket.tokens, bucket.at_us, rate.per_s, rate.burst, now_us)
        before = worst.get((api, region))
        ends = [until for until in (opened.get(bucket.name), before and before.open_until) if until]
        least = min(left, before.left) if before else left
        worst[api, region] = ApiUsage(api, region, least, rate.burst, max(ends, default=None))
    return [worst[key] for key in sorted(worst)]
