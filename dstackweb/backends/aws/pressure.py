"""How near each of AWS's APIs is to what is asked of it at most, and which are left alone: rows alone tell."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from dstackweb.backends.aws.rates import rate_of
from dstackweb.lib import circuit, limiter
from dstackweb.lib.models import Bucket, Circuit


@dataclass(frozen=True)
class Pressure:
    """One API in one region; of several accounts the one that is worst off.

    `left` of `burst` calls may be made at once; below zero it is how many wait for their turn. Until `open_until` AWS
    is left alone, having said that it is asked too often.
    """

    api: str
    region: str
    left: float
    burst: float
    open_until: dt.datetime | None = None


def pressures(now: dt.datetime) -> list[Pressure]:
    """Of all APIs that were ever asked, by name and region."""
    opened = {
        row.name: row.open_until
        for row in Circuit.objects.filter(name__startswith="aws:", open_until__gt=now)
        if row.open_until is not None and row.open_until <= now + dt.timedelta(seconds=circuit.CAP_S)
    }
    now_us = round(now.timestamp() * 1e6)
    worst: dict[tuple[str, str], Pressure] = {}
    for bucket in Bucket.objects.filter(name__startswith="aws:"):
        _aws, _account, region, api = bucket.name.split(":", 3)
        rate = rate_of(api)
        left = limiter.room(bucket.tokens, bucket.at_us, rate.per_s, rate.burst, now_us)
        before = worst.get((api, region))
        ends = [until for until in (opened.get(bucket.name), before and before.open_until) if until]
        least = min(left, before.left) if before else left
        worst[api, region] = Pressure(api, region, least, rate.burst, max(ends, default=None))
    return [worst[key] for key in sorted(worst)]
