"""GPUs for tests: a small C library in the place of NVIDIA's, under the real Python module."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FakeGpu:
    """`status` is what NVML answers for it: 0 in order, 15 lost."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB"
    memory_mib: int = 40960
    pids: Sequence[int] = ()
    status: int = 0


class Nvml:
    """A directory with the library and the file that says which GPUs there are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "gpus"
        source = Path(__file__).with_name("nvml_stub.c")
        library = folder / "libnvidia-ml.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        self.show()

    def show(self, *gpus: FakeGpu) -> None:
        """From now on, these are the machine's GPUs."""
        lines = [f"{g.uuid};{g.name};{g.memory_mib};{' '.join(map(str, g.pids))};{g.status}\n" for g in gpus]
        fresh = self.file.with_suffix(".new")
        fresh.write_text("".join(lines))
        fresh.replace(self.file)

    def env(self, **more: str) -> dict[str, str]:
        """The environment in which a new process finds the library."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "NVML_STUB": str(self.file), **more}
