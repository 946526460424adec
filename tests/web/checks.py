"""What the health page says, as tests look at it."""

from __future__ import annotations

from dstackweb.accounts.models import Project
from dstackweb.backends.kinds import HealthLine
from dstackweb.web.health import TONES, areas


def checks(project: Project) -> list[HealthLine]:
    """All checks of all areas, the worst first."""
    found = [line.check for area in areas(project) for line in (*area.faults, *area.fine)]
    return sorted(found, key=lambda check: -TONES.index(check.tone))
