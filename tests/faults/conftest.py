from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server

SHORT = {
    "DSTACKWEB_HEARTBEAT_S": "0.5",
    "DSTACKWEB_WATCH_EVERY_S": "0.3",
    "DSTACKWEB_PASS_EVERY_S": "0.5",
    "DSTACKWEB_HOST_SILENT_S": "2",
    "DSTACKWEB_LOST_AFTER_S": "3",
    "DSTACKWEB_LOG_LIMIT_MB": "1",
}


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """One deployment for all of this folder; a test that stops it starts it again."""
    with tempfile.TemporaryDirectory(prefix="faults-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as folder:
        Path(folder).chmod(0o755)
        with Server(Path(folder), **SHORT) as running:
            yield running
