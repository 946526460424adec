"""All actors work on one database at once, and every promise of the product holds; see `stress`."""

from __future__ import annotations

import collections
import json
import subprocess
import sys

import pytest

from tests.support import REPO

SECONDS = 20


@pytest.mark.nightly
def test_twenty_seconds_of_everything_at_once_break_nothing(deployment: dict[str, str]) -> None:
    soon = {"DSTACKWEB_START_DEADLINE_S": "0.3", "DSTACKWEB_WATCH_EVERY_S": "0.1", "DSTACKWEB_RESERVE_AFTER_S": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.scheduler.stress", str(SECONDS), "2"],
        cwd=REPO, env=deployment | soon, capture_output=True, text=True, check=False, timeout=SECONDS + 60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout.splitlines()[-1])
    last_lines = collections.Counter(error.strip().splitlines()[-1] for error in report["errors"])
    assert not report["errors"], f"{last_lines}\n\n{report['errors'][0]}"
    assert report["wrong"] == []
    assert report["ended"]["done"] > 0, report
    idle = {"submit", "prioritise", "move", "rank_anew", "place"} - {
        name for name, figures in report["acts"].items() if figures["per_s"]
    }
    assert not idle, f"nobody did: {idle}; {report['acts']}"
