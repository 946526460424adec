"""The starts that estimates show, and their track record, which corrects later ones.

Starts are counted by quantile, by how far ahead they were shown first, and by the time until the start divided by what
the simulation said. If nine tenths took up to 1.3 times what it said for P90, later ones say 1.3 times as long.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db import transaction
from django.db.models import F

from dstackweb.lib import sql
from dstackweb.lib.log_bins import LogBins
from dstackweb.runs.models import StartScore

QUANTILES = (50, 90)
HORIZONS_S = (900, 3600, 4 * 3600, 12 * 3600, 86_400)
"""The longest time ahead (whole seconds) in each group but the last."""
RATIOS = LogBins(least=1 / 16, per_octave=2, count=17)
FACTORS = (1 / 8, 8.0)
"""The bounds of a correction."""
SCORES_MIN = 30
"""Fewer starts correct nothing."""
SCORES_MAX = 400
"""From so many on, the counts of a group are halved, so that old starts fade."""
LEAST_S = 60.0
"""Times are shown in whole minutes: a shorter time ahead counts as one."""


class ShownEstimate(NamedTuple):
    """An estimate shown at `at` (Unix time): until P50 and P90 as simulated, in seconds, and the two times shown.

    P90 is None where fewer than nine of ten simulated starts happened at all.
    """

    at: float
    raw50_s: float
    raw90_s: float | None
    p50: float
    p90: float | None

    @property
    def horizon(self) -> int:
        """How far ahead that was."""
        return horizon_of(self.raw50_s)


def horizon_of(ahead_s: float) -> int:
    """The group of an estimate whose simulated P50 is so far ahead."""
    return bisect_left(HORIZONS_S, ahead_s)


@dataclass(frozen=True)
class Record:
    """The starts of one quantile and group: by ratio, and how many were in time."""

    bins: Counter[int] = field(default_factory=Counter)
    in_time: int = 0

    @property
    def starts(self) -> int:
        return self.bins.total()

    @property
    def share(self) -> float | None:
        """How many had started by the time shown; None without any."""
        return self.in_time / self.starts if self.starts else None

    def factor(self, quantile: int) -> float:
        """What a later estimate is multiplied with."""
        if self.starts < SCORES_MIN:
            return 1.0
        low, high = FACTORS
        return min(high, max(low, RATIOS.quantile(self.bins, quantile / 100) or 1.0))


Place = tuple[int, int, int]
"""Quantile, horizon, and bin of RATIOS."""
Records = Mapping[tuple[int, int], Record]
"""By quantile and horizon."""


def load_records() -> Records:
    bins: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    in_time: Counter[tuple[int, int]] = Counter()
    for quantile, horizon, number, starts, met in StartScore.objects.values_list(
        "quantile", "horizon", "bin", "starts", "in_time"
    ):
        bins[quantile, horizon][number] = starts
        in_time[quantile, horizon] += met
    return {key: Record(counts, in_time[key]) for key, counts in bins.items()}


def corrected(now: dt.datetime, raw50_s: float, raw90_s: float | None, records: Records) -> ShownEstimate:
    """What to show of a simulated start: corrected by the record, in whole minutes."""
    horizon = horizon_of(raw50_s)
    factor50, factor90 = (records.get((quantile, horizon), Record()).factor(quantile) for quantile in QUANTILES)
    at = now.timestamp()
    p50 = _whole_minute(at + raw50_s * factor50)
    p90 = None if raw90_s is None else max(p50, _whole_minute(at + raw90_s * factor90))
    return ShownEstimate(at, raw50_s, raw90_s, p50, p90)


def _whole_minute(at: float) -> float:
    return -(-at // 60) * 60.0


def tally(starts: Iterable[tuple[ShownEstimate, float]]) -> tuple[Counter[Place], Counter[Place]]:
    """Starts (Unix time) beside their estimates: how many at each place, and how many of these in time."""
    found: Counter[Place] = Counter()
    met: Counter[Place] = Counter()
    for shown, start in starts:
        horizon, took_s = shown.horizon, max(0.0, start - shown.at)
        for quantile, raw_s, by in ((50, shown.raw50_s, shown.p50), (90, shown.raw90_s, shown.p90)):
            if raw_s is not None and by is not None:
                place = quantile, horizon, RATIOS.bin_of(took_s / max(raw_s, LEAST_S))
                found[place] += 1
                met[place] += start <= by
    return found, met


def score(starts: Iterable[tuple[ShownEstimate, float]]) -> None:
    """Count starts beside their estimates. Call in the transaction that deletes the estimates."""
    changes, met = tally(starts)
    with transaction.atomic():
        for (quantile, horizon, number), count in sorted(changes.items()):
            key = {"quantile": quantile, "horizon": horizon, "bin": number}
            in_time = F("in_time") + met[quantile, horizon, number]
            sql.shift(StartScore, key, {"starts": F("starts") + count, "in_time": in_time})
        for quantile, horizon in sorted({key[:2] for key in changes}):
            rows = StartScore.objects.filter(quantile=quantile, horizon=horizon)
            if sum(rows.values_list("starts", flat=True)) >= SCORES_MAX:
                rows.update(starts=F("starts") / 2, in_time=F("in_time") / 2)
                rows.filter(starts=0).delete()


@dataclass(frozen=True)
class Calibration:
    """The track record of starts shown so far ahead: up to `ahead_s` seconds, None for longer."""

    ahead_s: int | None
    p50: Record
    p90: Record

    @property
    def factors(self) -> tuple[float, float]:
        """What simulated times ahead are multiplied with, for P50 and P90."""
        return self.p50.factor(50), self.p90.factor(90)


def calibration() -> list[Calibration]:
    """The track record by time ahead, where there is any; the last one is all of them."""
    records, whole = load_records(), {quantile: Record() for quantile in QUANTILES}
    found = []
    for horizon, ahead_s in enumerate((*HORIZONS_S, None)):
        p50, p90 = (records.get((quantile, horizon), Record()) for quantile in QUANTILES)
        if p50.starts:
            found.append(Calibration(ahead_s, p50, p90))
            whole = {50: _sum(whole[50], p50), 90: _sum(whole[90], p90)}
    return [*found, Calibration(None, whole[50], whole[90])] if found else []


def _sum(one: Record, other: Record) -> Record:
    return Record(one.bins + other.bins, one.in_time + other.in_time)
