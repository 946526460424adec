"""Measures tests, and writes which are too slow for the quick suite to tests/slow.txt.

    python -m tools.slow_tests              run them, one after another in two processes, and write the list
    python -m tools.slow_tests --of FILE    write it from what an earlier run wrote to FILE

CPU time is compared, since it hardly depends on what else the machine does. Tests that carry a mark are not listed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "slow.txt"
QUICK_S = 0.15
"""Seconds of CPU that a test of the quick suite may take; of a parametrized one, on average."""


def name_of(test: str) -> str:
    """The test function: without its parameters and the group that pytest-xdist adds."""
    return test.partition("[")[0].partition("@")[0]


def slow(lines: Iterable[str]) -> list[str]:
    """The names of the slow tests, in order. `lines` are those that tests/cpu_times.py writes."""
    took = defaultdict(list)
    for line in lines:
        seconds, test = line.rstrip("\n").split("\t", 1)
        took[name_of(test)].append(float(seconds))
    return sorted(name for name, seconds in took.items() if mean(seconds) > QUICK_S)


def measured() -> str:
    """What the tests took."""
    with tempfile.NamedTemporaryFile("r") as file:
        env = {**os.environ, "DSTACKWEB_TEST_SIDE": "sqlite", "DSTACKWEB_TEST_CPU": file.name}
        chosen = "not nightly and not gpu and (listed or not slow)"
        words = ["-q", "-n", "2", "--dist", "loadgroup", "-p", "tests.cpu_times", "-m", chosen]
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=env, check=True)
        return file.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=Path, help="what an earlier run wrote")
    asked = parser.parse_args()
    found = slow((asked.of.read_text() if asked.of else measured()).splitlines())
    LIST.write_text("".join(f"{name}\n" for name in found))
    print(f"{len(found)} tests in {LIST.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
