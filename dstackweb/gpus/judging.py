"""From rows to the pure verdict: moments, and what of a policy and of a GPU's series it looks at."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Literal, cast

from django.conf import settings

from dstackweb.gpus import window
from dstackweb.gpus.models import GpuSeries, JobPolicy


def to_ms(moment: dt.datetime) -> int:
    """Whole milliseconds since 1970."""
    return round(moment.timestamp() * 1000)


def to_moment(at_ms: int) -> dt.datetime:
    """A moment of whole milliseconds, in UTC."""
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC)


def interval_ms() -> int:
    """Between two samples."""
    return round(settings.DSTACKWEB_SAMPLE_EVERY_S * 1000)


def stretch_of(series: GpuSeries | None) -> window.Stretch:
    """What the verdict needs of a GPU; without a series it was never seen."""
    return window.NOTHING if series is None else window.Stretch(series.low_since_ms, series.low_last_ms)


def window_of(policy: JobPolicy) -> window.Window:
    """What the verdict needs of a policy."""
    scope = cast(Literal["any", "all"], policy.scope)
    return window.Window(policy.time_window_s * 1000, scope, policy.from_ms)


def verdict_of(policy: JobPolicy, gpus: Iterable[str], series: Mapping[str, GpuSeries], now_ms: int) -> window.Verdict:
    """The verdict on a job by its bound policy, its GPUs' UUIDs and its series by UUID.

    Whoever has no minimum is never judged: that is unknown.
    """
    if policy.min_gpu_utilization is None:
        return window.UNKNOWN
    return window.judge(window_of(policy), [stretch_of(series.get(uuid)) for uuid in gpus], now_ms, interval_ms())
