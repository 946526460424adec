"""How near each AWS API is to its rate limit, and which are not called because they throttled. Reads rows only."""

from __future__ import annotations

import datetime as dt

from dstackweb.backends.aws.rates import rate_of
from dstackweb.backends.kinds import ApiUsage
from dstackweb.lib import circuit, limiter
from dstackweb.lib.models import Bucket, Circuit


def api_usage(now: dt.datetime) -> list[ApiUsage]:
    """Of all APIs that were ever called, by name and region."""
    opened = {
        row.name: row.open_until
        for row in Circuit.objects.filter(name__startswith="aws:", open_until__gt=now)
        if row.open_until is not None and row.open_until <= now + dt.timedelta(seconds=circuit.CAP_S)
    }
    now_us = round(now.timestamp() * 1e6)
    worst: dict[tuple[str, str], ApiUsage] = {}
    for bucket in Bucket.objects.filter(name__startswith="aws:"):
        _aws, _account, region, api = bucket.name.split(":", 3)
        rate = rate_of(api)
        left = limiter.room(bucket.tokens, bucket.at_us, rate.per_s, rate.burst, now_us)
        before = worst.get((api, region))
        ends = [until for until in (opened.get(bucket.name), before and before.open_until) if until]
        least = min(left, before.left) if before else left
        worst[api, region] = ApiUsage(api, region, least, rate.burst, max(ends, default=None))
    return [worst[key] for key in sorted(worst)]
