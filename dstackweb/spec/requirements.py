"""The resources of each node, as numbers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from dstackweb.spec.gpu import format_gpu
from dstackweb.spec.run_fields import ResourcesFields
from dstackweb.spec.units import Range, format_memory, format_range

DEFAULT_CPU_MIN = 1
DEFAULT_MEMORY_MIN_MIB = 256
"""Defaults, small so that such runs don't wait for long."""


class Requirements(BaseModel):
    """Per node. A `…_max` of None is unlimited. With `gpu_count_min` 0 no GPU is needed."""

    model_config = ConfigDict(frozen=True)

    cpu_min: int = DEFAULT_CPU_MIN
    cpu_max: int | None = None
    memory_min_mib: int = DEFAULT_MEMORY_MIN_MIB
    memory_max_mib: int | None = None
    gpu_count_min: int = 0
    gpu_count_max: int | None = None
    gpu_names: tuple[str, ...] = ()
    gpu_memory_min_mib: int | None = None
    gpu_memory_max_mib: int | None = None

    @classmethod
    def of(cls, fields: ResourcesFields | None) -> Requirements:
        """From a run file's `resources`, with defaults for missing keys."""
        if fields is None:
            return cls()
        found: dict[str, int | tuple[str, ...] | None] = {}
        if fields.cpu:
            found |= {"cpu_min": fields.cpu.min or DEFAULT_CPU_MIN, "cpu_max": fields.cpu.max}
        if fields.memory:
            least, most = fields.memory.min, fields.memory.max
            if least is None:
                least = min(DEFAULT_MEMORY_MIN_MIB, most or DEFAULT_MEMORY_MIN_MIB)
            found |= {"memory_min_mib": least, "memory_max_mib": most}
        if fields.gpu:
            count, memory = fields.gpu.count, fields.gpu.memory or Range(None, None)
            found |= {
                # `..2` needs one GPU, `0..2` none.
                "gpu_count_min": min(1, count.max or 0) if count.min is None else count.min,
                "gpu_count_max": count.max,
                "gpu_names": fields.gpu.name or (),
                "gpu_memory_min_mib": memory.min,
                "gpu_memory_max_mib": memory.max,
            }
        return cls.model_validate(found)

    def as_resources(self) -> dict[str, str]:
        """The same in the notation of the run file's `resources`."""
        shown = {
            "cpu": format_range(Range(self.cpu_min, self.cpu_max)),
            "memory": format_range(Range(self.memory_min_mib, self.memory_max_mib), format_memory),
        }
        count = Range(self.gpu_count_min, self.gpu_count_max)
        memory = Range(self.gpu_memory_min_mib, self.gpu_memory_max_mib)
        if self.gpu_names or count != Range(0, None) or memory != Range(None, None):
            shown["gpu"] = format_gpu(self.gpu_names, memory, count)
        return shown
