"""Every benchmark still runs, and prints a table with figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly  # they start servers, browsers and clusters of their own
ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {
    "api_list": "sqlite 60",
    "aws_calls": "sqlite",
    "dask_progress": "2",
    "folded_queue": "sqlite",
    "gpu_poll": "20",
    "gpu_samples": "sqlite 16",
    "heartbeats": "sqlite 40",
    "history": "sqlite 200",
    "load": "sqlite 4 2 2 1 1",
    "long_queue": "sqlite 200",
    "offers_cache": "sqlite 40",
    "page_updates": "",
    "progress_ingest": "sqlite 2000",
    "progress_read": "sqlite 2000",
    "queue_past": "sqlite 200",
    "run_lists": "sqlite 200",
    "sample_requests": "sqlite 8",
    "sixty_hosts": "sqlite 4 8",
    "start_estimates": "sqlite 60",
    "storage": "sqlite 1",
    "submit_to_running": "2 hosts",
    "throughput": "sqlite 8 2 2",
    "time_left": "1",
    "traces": "60 1 2",
    "tracking": "2000 1",
    "urgent_launch": "sqlite 1 0 3",
}
"""The benchmarks, each with arguments that make it short."""


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_its_figures(name: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("DSTACKWEB_", "DJANGO_"))}
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", *SMALL[name].split()],
        cwd=ROOT, env=env, text=True, capture_output=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    figures = [found for line in done.stdout.splitlines()[1:] for found in re.findall(r"\s\d", line)]
    assert len(figures) > 2, done.stdout


def test_none_is_forgotten() -> None:
    programs = {path.stem for path in (ROOT / "bench").glob("*.py") if "if __name__ ==" in path.read_text("utf-8")}
    assert programs == SMALL.keys()
