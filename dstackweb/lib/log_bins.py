"""Counts of values in bins of equal ratio, as mappings of bins to counts, and quantiles of them: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LogBins:
    """`count` bins: the first takes all up to `least`, the last the rest, `per_octave` of them make a doubling."""

    least: float
    per_octave: int
    count: int

    def bin_of(self, value: float) -> int:
        if value <= self.least:
            return 0
        # A little less, so that a bound is in the bin that it ends.
        return min(self.count - 1, math.ceil(self.per_octave * math.log2(value / self.least) - 1e-9))

    def high(self, number: int) -> float:
        """The most that a bin takes; of the last one, as if it ended there."""
        return float(self.least * 2 ** (number / self.per_octave))

    def low(self, number: int) -> float:
        """What a bin's values are above."""
        return self.high(number - 1) if number else 0.0

    def quantile(self, counts: Mapping[int, int], share: float, above: float = 0.0) -> float | None:
        """The value that `share` of those above `above` are up to; None if there are none."""
        found = self.quantiles(counts, [share], above)
        return found[0] if found else None

    def quantiles(self, counts: Mapping[int, int], shares: Sequence[float], above: float = 0.0) -> list[float]:
        """The values that these shares, in rising order, of those above `above` are up to; empty if there are none.

        Within a bin, values are taken to lie evenly.
        """
        parts = [(max(self.low(number), above), self.high(number), self._part(number, above) * counts[number])
                 for number in sorted(counts) if counts[number] > 0 and self.high(number) > above]  # fmt: skip
        total = sum(weight for _low, _high, weight in parts)
        if total <= 0:
            return []
        found, passed, at = [], 0.0, 0
        for share in shares:
            while at < len(parts) - 1 and share * total > passed + parts[at][2]:
                passed += parts[at][2]
                at += 1
            low, high, weight = parts[at]
            found.append(low + (high - low) * min(1.0, (share * total - passed) / weight))
        return found

    def _part(self, number: int, above: float) -> float:
        """How much of a bin is above a value."""
        low, high = self.low(number), self.high(number)
        return 1.0 if above <= low else (high - above) / (high - low)
