"""A difference between a counter and a recount, as `manage.py recount --check` prints it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """The counter `what` has the value `kept`; a recount gives `counted`."""

    what: str
    kept: float
    counted: float

    def __str__(self) -> str:
        return f"{self.what}: kept {self.kept}, counted {self.counted}"
