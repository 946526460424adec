"""Keeps one GPU busy, with nothing but its driver: `python tests/gpu/load.py UUID SECONDS [PERCENT]`.

Prints a line once the GPU works. PERCENT is how much of the time, in turns of 0.2 s. It holds MEMORY_MIB meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

MEMORY_MIB = 1024
TURN_S = 0.2
BLOCKS, THREADS = 256, 128
SPIN_NS = 10_000_000
BLOCKING_SYNC = 4

PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 ns)
{
    .reg .u64 %rd<5>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [ns];
    mov.u64 %rd2, %globaltimer;
AGAIN:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra AGAIN;
    ret;
}
"""


def main(uuid: str, seconds: float, percent: float = 100) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if status := getattr(cuda, name)(*arguments):
            sys.exit(f"{name}: {status}")

    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    memory = ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuCtxCreate_v2", ctypes.byref(context), BLOCKING_SYNC, device)
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"spin")
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(MEMORY_MIB << 20))
    nanoseconds = ctypes.c_uint64(SPIN_NS)
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(nanoseconds), ctypes.c_void_p))

    def spin() -> None:
        call("cuLaunchKernel", kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, None, arguments, None)
        call("cuCtxSynchronize")

    spin()
    print("busy", flush=True)
    ends = time.monotonic() + seconds
    while (began := time.monotonic()) < ends:
        while time.monotonic() < began + TURN_S * percent / 100:
            spin()
        time.sleep(max(0.0, began + TURN_S - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
