"""A short form of `make chaos`: parts of a deployment die under load, and each run ends as its commands say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.chaos.story import Story

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("chaos")]


def test_half_a_minute_of_chaos_loses_no_run_and_executes_none_twice(open_home: Path) -> None:
    assert Story(open_home, runs=30, minutes=0.5, seed=int(os.environ.get("SEED") or 1)).run() == []
