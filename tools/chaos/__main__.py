"""Runs on a deployment of two control planes and three hosts, of which something dies every few seconds.

    python -m tools.chaos          RUNS=1000 MINUTES=10 SEED=1 from the environment

Exit code 1 if a run was lost, executed twice, or ended in another status than by its own command (docs/performance.md).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tools.chaos.story import Story


def main() -> int:
    runs, minutes = int(os.environ.get("RUNS") or 1000), float(os.environ.get("MINUTES") or 10)
    seed = int(os.environ.get("SEED") or time.time())
    folder = Path(tempfile.mkdtemp(prefix="dw-chaos-", dir="/tmp"))
    folder.chmod(0o755)  # PostgreSQL and the jobs run as other users
    found: list[str] = []
    try:
        found = Story(folder, runs, minutes, seed).run()
    finally:
        if found or os.environ.get("KEEP"):
            print(f"logs and databases: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
