"""Fixtures for tests against the cloud: import `cloud` into the conftest.py that wants it.

One process serves all tests of a session; each test gets it as new.
"""

from __future__ import annotations

from functools import cache

import pytest

from dstackweb.devtools.aws.handle import Cloud


@cache
def running() -> Cloud:
    """Ends with the test process."""
    return Cloud.start()


@pytest.fixture
def cloud() -> Cloud:
    cloud = running()
    cloud.reset()
    return cloud
