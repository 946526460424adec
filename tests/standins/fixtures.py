"""Import `cloud` into a conftest.py. One process serves all tests of a session, and is reset before each."""

from __future__ import annotations

from functools import cache

import pytest

from standins.aws import Cloud


@cache
def running() -> Cloud:
    """Stopped when the test process ends."""
    return Cloud.start()


@pytest.fixture
def cloud() -> Cloud:
    cloud = running()
    cloud.reset()
    return cloud
