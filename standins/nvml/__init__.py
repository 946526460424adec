"""Simulated GPUs: a small C library in the place of NVIDIA's NVML."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from dstackweb.runner import nvml
from standins.programs import require

Steps = int | str | None
"""A number; or steps over time, as stub.c reads them ("0:95,30:!15,60:-"); None: not reported."""


HANGS, CRASHES = 1000, 1001
"""A driver that never answers, and one that kills the process that calls it."""


@dataclass(frozen=True)
class FakeGpu:
    """`status` is NVML's status for the GPU: 0 OK, 15 lost. A UUID that begins with MIG- is a MIG device of the GPU
    before it. `pids` are compute processes, each with its MiB ("41:1024") or without. `mig=1` splits the GPU even
    without devices; with `gpm=1` its devices report their utilization."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB"
    memory_mib: int = 40960
    pids: Sequence[int | str] = ()
    status: Steps = 0
    util: Steps = None
    mem: Steps = None
    power: Steps = None
    limit: Steps = None
    temp: Steps = None
    throttle: Steps = None
    mig: Steps = None
    gpm: Steps = None

    def line(self) -> str:
        head = f"{self.uuid};{self.name};{self.memory_mib};{' '.join(map(str, self.pids))};{self.status}"
        keys = ("util", "mem", "power", "limit", "temp", "throttle", "mig", "gpm")
        return ";".join([head, *(f"{key}={getattr(self, key)}" for key in keys if getattr(self, key) is not None)])


class Nvml:
    """A directory with the library and the file that defines the GPUs; `old` lacks newer functions."""

    def __init__(self, folder: Path, *, old: bool = False) -> None:
        self.folder = folder
        self.file = folder / "gpus"
        self.library = folder / "libnvidia-ml.so.1"
        build(self.library, old=old)
        self.show()

    def show(self, *gpus: FakeGpu, now: float | None = None, loop: int | None = None, driver: Steps = None) -> None:
        """Set the machine's GPUs. `now` fixes the steps' time; `driver` is the status of every call."""
        common = {"now": now, "loop": loop, "driver": driver}
        lines = [f"{key}={value}" for key, value in common.items() if value is not None]
        fresh = self.file.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in [*lines, *(gpu.line() for gpu in gpus)]))
        fresh.replace(self.file)

    def env(self, **more: str) -> dict[str, str]:
        """The environment in which a new process finds the library."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "NVML_STUB": str(self.file), **more}

    @contextmanager
    def here(self) -> Iterator[None]:
        """In this process, too. The library stays loaded; without its file it reports that it isn't there."""
        ctypes.CDLL(str(self.library), mode=ctypes.RTLD_GLOBAL)  # further loads by name find what has that name
        with (
            mock.patch.dict(os.environ, NVML_STUB=str(self.file)),
            mock.patch.object(nvml, "_library", None),
        ):
            yield


def build(library: Path, *, old: bool = False) -> None:
    """Compile the library. Raises Missing without gcc."""
    require("gcc")
    source = Path(__file__).with_name("stub.c")
    command = ["gcc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    subprocess.run([*command, *(["-DOLD"] if old else [])], check=True)
