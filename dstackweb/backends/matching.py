"""Whether a GPU, and whether a whole machine, meets a job's requirements: pure."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Protocol

from dstackweb.spec.effective import Requirements

MEMORY_TOLERANCE = 0.92
"""A card sold with 24 GB reports as little as 22,731 MiB, because error correction and the driver keep some; the
nearest smaller card (11 GB for 12 GB) stays below this share of the nominal size."""

OTHER_MODEL = frozenset({"ti", "super", "ada", "d"})
"""Words after a model's name that make it another model: an RTX 3080 Ti is not an RTX 3080."""

PART = "mig"
"""The word in the name of a MIG device, as in "NVIDIA A100-SXM4-40GB MIG 1g.5gb"."""

_WORD = re.compile(r"[a-z0-9]+")


class Machine(Protocol):
    """The resources of a machine, an instance type or an offer."""

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


def meets(machine: Machine, needs: Requirements) -> bool:
    """Whether a job with these needs may have the whole machine.

    More CPUs and memory than required are accepted, because the cheapest machine comes first anyway. More GPUs than the
    maximum are not: they would be paid for and unused, since no other job can have them.
    """
    return (
        machine.cpus >= needs.cpu_min
        and machine.memory_mib >= needs.memory_min_mib
        and machine.gpu_count >= needs.gpu_count_min
        and (needs.gpu_count_max is None or machine.gpu_count <= needs.gpu_count_max)
        and (needs.gpu_count_min == 0 or gpu_matches(machine.gpu_name, machine.gpu_memory_mib, needs))
    )


def gpu_matches(name: str, memory_mib: int, needs: Requirements) -> bool:
    """Whether a GPU has one of the required names and a memory within the limits, which are nominal sizes."""
    if needs.gpu_memory_min_mib is not None and memory_mib < needs.gpu_memory_min_mib * MEMORY_TOLERANCE:
        return False
    if needs.gpu_memory_max_mib is not None and memory_mib > needs.gpu_memory_max_mib:
        return False
    return not needs.gpu_names or any(name_matches(wanted, name) for wanted in needs.gpu_names)


@functools.lru_cache(4096)
def name_matches(wanted: str, name: str) -> bool:
    """Whether NVML's `name` of a card is the `wanted` model, ignoring case, spaces and dashes.

    Whole words only: "A100" and "A100-SXM4" are in "NVIDIA A100-SXM4-80GB", "RTX4090" is in "NVIDIA GeForce RTX 4090",
    "H100" is not in "NVIDIA GH100", "L40" not in "NVIDIA L40S". A part of a card is not the card: a MIG device is found
    by its profile, "MIG 1g.5gb".
    """
    joined = "".join(_WORD.findall(wanted.lower()))
    return joined in _models(name) and (PART in joined or not is_part(name))


@functools.lru_cache(256)
def _models(name: str) -> frozenset[str]:
    """All models, in small letters and without spaces, whose name is in a card's: few cards are compared with many."""
    words = _WORD.findall(name.lower())
    spans = itertools.combinations(range(len(words) + 1), 2)
    return frozenset("".join(words[i:j]) for i, j in spans if not OTHER_MODEL & {*words[j : j + 1]})


@functools.lru_cache(256)
def is_part(name: str) -> bool:
    return PART in _WORD.findall(name.lower())
