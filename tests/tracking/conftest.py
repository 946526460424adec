"""A listening server, and this process reporting to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dstackweb.tracking import current
from tests.tracking.ear import Ear


@pytest.fixture
def ear() -> Iterator[Ear]:
    with Ear() as ear:
        yield ear


@pytest.fixture
def reporting(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ear]:
    """This process reports there, from a fresh start."""
    for name, value in ear.env.items():
        monkeypatch.setenv(name, value)
    current._after_fork()
    yield ear
    current.close(1)
    current._after_fork()
