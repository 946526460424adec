"""`make demo-ray`: the server with a Ray cluster of one node on this machine (docs/ray.md).

The cluster's files are temporary. Its two GPUs are only counted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from standins.ray import Ray
from tools.served import Demo, complain, run_demo


def main(demo: Demo) -> int:
    """Run until Ctrl-C; returns the server's exit status."""
    with tempfile.TemporaryDirectory(prefix="demo-ray-", ignore_cleanup_errors=True) as folder:
        ray = Ray(Path(folder))
        print("Starting a Ray cluster on this machine …", flush=True)
        try:
            ray.start()
            return demo.serve(lambda: set_up(demo, ray.address), env={"DSTACKWEB_PUBLIC_URL": demo.url})
        finally:
            ray.stop()


def set_up(demo: Demo, address: str) -> None:
    """Add the cluster as a backend, and print what to look at."""
    try:
        config = {"projects": ["main"], "address": address}
        demo.call("PUT", "backends/cluster", {"type": "ray", "config": config})
    except OSError as error:
        complain("the cluster can't be set up as a backend", error)
        return
    print(
        f"  Demo       Ray as the backend `cluster`: 6 CPUs, 2 × A100 that are only counted; its dashboard: {address}\n"
        f"             its offers, within some seconds: {demo.url}/p/main/offers/\n"
        f"             a run there: .venv/bin/dstackweb login {demo.url} --token {demo.token}\n"
        f"                          .venv/bin/dstackweb apply -f examples/ray.yaml\n",
        flush=True,
    )


if __name__ == "__main__":
    run_demo("ray", main)
