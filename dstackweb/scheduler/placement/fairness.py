"""Which project goes first when several wait for the same capacity: weighted fair sharing, pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProjectUsage:
    """What a project's jobs hold on hosts."""

    gpus: int = 0
    cpus: int = 0

    def plus(self, gpus: int, cpus: int) -> ProjectUsage:
        """This usage plus more."""
        return ProjectUsage(self.gpus + gpus, self.cpus + cpus)


def fair_share_key(held: ProjectUsage, weight: int, asks_gpus: bool, seniority_us: int) -> tuple[float, int]:
    """Sort key, smallest first: GPUs per weight (CPUs for a run without GPUs), then the earlier submission."""
    return (held.gpus if asks_gpus else held.cpus) / weight, seniority_us
