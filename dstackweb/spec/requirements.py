"""What each node of a run needs, as numbers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from dstackweb.spec.gpu import format_gpu
from dstackweb.spec.run_fields import ResourcesFields
from dstackweb.spec.units import Range, format_memory, format_range

DEFAULT_CPU_MIN = 1
DEFAULT_MEMORY_MIN_MIB = 256
"""What a run gets that doesn't say: little, so that such runs never wait for long."""


class Requirements(BaseModel):
    """Per node. A `…_max` of None is open. Where `gpu_count_min` is 0, no GPU is needed."""

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
    def of(cls, asked: ResourcesFields | None) -> Requirements:
        """The requirements of a run file's `resources`, with the defaults where it says nothing."""
        if asked is None:
            return cls()
        found: dict[str, int | tuple[str, ...] | None] = {}
        if asked.cpu:
            found |= {"cpu_min": asked.cpu.min or DEFAULT_CPU_MIN, "cpu_max": asked.cpu.max}
        if asked.memory:
            least, most = asked.memory.min, asked.memory.max
            if least is None:
                least = min(DEFAULT_MEMORY_MIN_MIB, most or DEFAULT_MEMORY_MIN_MIB)
            found |= {"memory_min_mib": least, "memory_max_mib": most}
        if asked.gpu:
            count, memory = asked.gpu.count, asked.gpu.memory or Range(None, None)
            found |= {
                # Asking for "at most two GPUs" is asking for one, unless it says zero.
                "gpu_count_min": min(1, count.max or 0) if count.min is None else count.min,
                "gpu_count_max": count.max,
                "gpu_names": asked.gpu.name or (),
                "gpu_memory_min_mib": memory.min,
                "gpu_memory_max_mib": memory.max,
            }
        return cls.model_validate(found)

    def as_resources(self) -> dict[str, str]:
        """The run file's `resources` that say the same."""
        shown = {
            "cpu": format_range(Range(self.cpu_min, self.cpu_max)),
            "memory": format_range(Range(self.memory_min_mib, self.memory_max_mib), format_memory),
        }
        count = Range(self.gpu_count_min, self.gpu_count_max)
        memory = Range(self.gpu_memory_min_mib, self.gpu_memory_max_mib)
        if self.gpu_names or count != Range(0, None) or memory != Range(None, None):
            shown["gpu"] = format_gpu(self.gpu_names, memory, count)
        return shown
