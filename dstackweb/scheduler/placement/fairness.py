"""Which project's turn it is, where several wait for the same capacity: weighted fair, and pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProjectUsage:
    """What a project's jobs hold of the hosts."""

    gpus: int = 0
    cpus: int = 0

    def plus(self, gpus: int, cpus: int) -> ProjectUsage:
        """With this on top."""
        return ProjectUsage(self.gpus + gpus, self.cpus + cpus)


def fair_share_key(held: ProjectUsage, weight: int, asks_gpus: bool, seniority_us: int) -> tuple[float, int]:
    """The least goes first: what it holds per weight (CPUs for a run without GPUs), then the earlier submit."""
    return (held.gpus if asks_gpus else held.cpus) / weight, seniority_us
