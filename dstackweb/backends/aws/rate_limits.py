"""Rate limits of AWS calls per account, region and API, shared by all processes.

They are half of AWS's documented limits, to leave the rest to the account's other programs: 20 per second and a burst
of 100 for reads in EC2, 2 and 5 for RunInstances, 5 and 100 for TerminateInstances
(https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html), 10 and 10 for ListServiceQuotas
(https://docs.aws.amazon.com/servicequotas/latest/userguide/reference_limits.html). Others are undocumented.
"""

from __future__ import annotations

import datetime as dt
from typing import NamedTuple

from dstackweb.backends.kinds import ApiUsage
from dstackweb.lib.models import CAP_S, Bucket, Circuit, room


class RateLimit(NamedTuple):
    """Calls per second, and the burst."""

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
    """The rate of an API, such as `ec2.RunInstances`: its own, or its service's."""
    return RATES.get(api) or RATES.get(api.partition(".")[0], OTHERS)


def api_usage(now: dt.datetime) -> list[ApiUsage]:
    """All APIs that were ever called, by name and region."""
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
