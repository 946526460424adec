"""`make demo-dask`: the server with a Dask cluster of two workers on this machine (docs/dask-backend.md).

The cluster's files are temporary, and its two GPUs are only counted. Anyone on this machine can use its scheduler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from standins.dask import Dask
from tools.served import ROOT, Demo, complain, run_demo

PROFILE = """
from dstackweb.profiles.models import Profile
Profile.objects.update_or_create(project=None, name="on-dask", defaults={"settings": {"backends": ["cluster"]}})
"""


def main(demo: Demo) -> int:
    """Run until Ctrl-C; returns the server's exit status."""
    with tempfile.TemporaryDirectory(prefix="demo-dask-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        dask = Dask(Path(folder))
        print("Starting a Dask cluster of two workers on this machine …", flush=True)
        try:
            dask.start()
            return demo.serve(lambda: set_up(demo, dask), env={"DSTACKWEB_PUBLIC_URL": demo.url})
        finally:
            dask.stop()


def set_up(demo: Demo, dask: Dask) -> None:
    """Add the cluster as a backend, and a profile that leads there; print what to look at."""
    try:
        config = {"projects": ["main"], "scheduler": dask.address, "gpus": ["GPU=A100:80GB"]}
        demo.call("PUT", "backends/cluster", {"type": "dask", "config": config})
        subprocess.run(
            [sys.executable, "manage.py", "shell", "--no-imports", "-c", PROFILE], cwd=ROOT, env=os.environ, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        complain("the cluster can't be set up as a backend", OSError(error))
        return
    print(
        f"  Demo       Dask as the backend `cluster`: 8 CPUs, 2 × A100 that are only counted\n"
        f"             its offers, within some seconds: {demo.url}/p/main/offers/\n"
        f"             the same file on this machine, and there by its profile:\n"
        f"                 .venv/bin/dstackweb login {demo.url} --token {demo.token}\n"
        f"                 .venv/bin/dstackweb apply -f examples/hello.yaml\n"
        f"                 .venv/bin/dstackweb apply -f examples/hello.yaml --profile on-dask --name hello-dask\n",
        flush=True,
    )


if __name__ == "__main__":
    run_demo("dask", main)
