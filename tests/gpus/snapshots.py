"""Looks at GPUs as NVML would give them, for tests of what becomes of them."""

from __future__ import annotations

from typing import Any

from dstackweb.runner.nvml import Sample, Snapshot

EVERY_MS = 10_000
START_MS = 1_800_000_000_000
"""A moment that all series of tests may begin at: whole five minutes."""


def sample(uuid: str, utilization: int | None = 0, **more: Any) -> Sample:
    """One GPU of a host made by the factory."""
    values = {
        "index": int(uuid.rsplit("-", 1)[-1]), "name": "NVIDIA A100-SXM4-80GB", "memory_mib": 81920,
        "memory_used_mib": 1000, "power_w": 90, "power_limit_w": 400, "temperature_c": 40, "throttle": 0,
        "processes": (),
    } | more  # fmt: skip
    return Sample(uuid=uuid, utilization=utilization, **values)


def snapshot(**utilization: int | None) -> Snapshot:
    """All GPUs of the host `box-1` that answer: `snapshot(g0=50, g1=None)`; None is a GPU that doesn't report."""
    return Snapshot(
        samples=tuple(sample(f"GPU-box-1-{name[1:]}", used) for name, used in utilization.items()), took_ms=0.4
    )
