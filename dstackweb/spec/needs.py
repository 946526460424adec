"""What a run needs, as short as lists show it, and its code, which means the same in every language."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_CODE = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x([A-Za-z][\w .,-]*?)(?::(\d{1,9})(GB|MB))?", re.ASCII)


class Needs(NamedTuple):
    """Of each of `nodes`: GPUs, of these models and with this memory if any, or else CPUs."""

    nodes: int = 1
    gpus: int = 0
    names: tuple[str, ...] = ()
    memory_mib: int = 0
    cpus: int = 0

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Needs:
        """Those of an EffectiveSpec as JSON, of which `requirements` and `nodes` are read."""
        wants = spec["requirements"]
        nodes, gpus = spec.get("nodes", 1), wants["gpu_count_min"]
        if not gpus:
            return cls(nodes, cpus=wants["cpu_min"])
        names = tuple(wants["gpu_names"])
        return cls(nodes, gpus, names, (wants.get("gpu_memory_min_mib") or 0) if names else 0)

    @property
    def code(self) -> str:
        """`2xCPU`, `1xGPU`, `2xA100:40GB`, `4x8xH100,H200` for four nodes."""
        each = f"{self.gpus}x{','.join(self.names) or 'GPU'}" if self.gpus else f"{self.cpus}xCPU"
        if self.memory_mib:
            gib, rest = divmod(self.memory_mib, 1024)
            each += f":{self.memory_mib}MB" if rest else f":{gib}GB"
        return f"{self.nodes}x{each}" if self.nodes > 1 else each

    @classmethod
    def parse(cls, code: str) -> Needs | None:
        """The opposite of `code`; None if it is none."""
        found = _CODE.fullmatch(code)
        if found is None:
            return None
        nodes, count, what, memory, unit = found.groups()
        if what == "CPU":
            return cls(int(nodes or 1), cpus=int(count))
        names = () if what == "GPU" else tuple(what.split(","))
        return cls(int(nodes or 1), int(count), names, int(memory or 0) * (1024 if unit == "GB" else 1))
