"""A counter beside a recount, as `manage.py recount --check` names it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """A counter that says `kept` where a recount gives `counted`."""

    what: str
    kept: float
    counted: float

    def __str__(self) -> str:
        return f"{self.what}: kept {self.kept}, counted {self.counted}"
