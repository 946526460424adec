"""`make demo-slurm`: the server with a Slurm cluster of two nodes on this machine (docs/slurm.md).

Needs root and Debian's packages of Slurm; the cluster's files are temporary. Its two GPUs are only counted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from standins.slurm import Slurm
from tools.served import Demo, complain, run_demo


def main(demo: Demo) -> int:
    """Run until Ctrl-C; returns the server's exit status."""
    with tempfile.TemporaryDirectory(prefix="demo-slurm-", ignore_cleanup_errors=True) as folder:
        slurm = Slurm(Path(folder))
        print("Starting a Slurm of two nodes on this machine …", flush=True)
        try:
            slurm.start()
            return demo.serve(lambda: set_up(demo), env=slurm.env | {"DSTACKWEB_PUBLIC_URL": demo.url})
        finally:
            slurm.stop()


def set_up(demo: Demo) -> None:
    """Add the cluster as a backend, and print what to look at."""
    try:
        config = {"projects": ["main"], "partitions": ["main", "whole"]}
        demo.call("PUT", "backends/cluster", {"type": "slurm", "config": config})
    except OSError as error:
        complain("the cluster can't be set up as a backend", error)
        return
    print(
        f"  Demo       Slurm as the backend `cluster`: 8 CPUs, 2 × A100 that are only counted\n"
        f"             its offers, within some seconds: {demo.url}/p/main/offers/\n"
        f"             a run there: .venv/bin/dstackweb login {demo.url} --token {demo.token}\n"
        f"                          .venv/bin/dstackweb apply -f examples/slurm.yaml\n",
        flush=True,
    )


if __name__ == "__main__":
    run_demo("slurm", main)
