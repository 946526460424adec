"""Whether a job may have a machine that nobody else has anything of: pure."""

from __future__ import annotations

from typing import Protocol

from dstackweb.backends.hosts.gpu_match import gpu_matches
from dstackweb.spec.requirements import Requirements


class Whole(Protocol):
    """What there is of a machine, or of a type of machines."""

    @property
    def cpus(self) -> int: ...
    @property
    def memory_mib(self) -> int: ...
    @property
    def gpu_name(self) -> str: ...
    @property
    def gpu_count(self) -> int: ...
    @property
    def gpu_memory_mib(self) -> int: ...


def meets(machine: Whole, needs: Requirements) -> bool:
    """Whether a job with these needs may have all of it.

    CPUs and memory above what was asked for come with the machine, as on a host, and the cheapest comes first. GPUs
    above the most that was asked for would be paid for and unused: unlike a host's, nobody else could have them.
    """
    if machine.cpus < needs.cpu_min or machine.memory_mib < needs.memory_min_mib:
        return False
    if machine.gpu_count < needs.gpu_count_min:
        return False
    if needs.gpu_count_max is not None and machine.gpu_count > needs.gpu_count_max:
        return False
    return needs.gpu_count_min == 0 or gpu_matches(
        machine.gpu_name,
        machine.gpu_memory_mib,
        names=needs.gpu_names,
        memory_min_mib=needs.gpu_memory_min_mib,
        memory_max_mib=needs.gpu_memory_max_mib,
    )
