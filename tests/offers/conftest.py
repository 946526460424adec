from __future__ import annotations

from pathlib import Path

import pytest

from dstackweb.backends.models import Backend
from tests.offers.cloud_stub import Clock, Cloud


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cloud:
    return Cloud(monkeypatch, tmp_path / "asked")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def backend(cloud: Cloud, db: None) -> Backend:
    return Backend.objects.create(name="cloud", kind="aws")


@pytest.fixture
def plain(cloud: Cloud, db: None) -> Backend:
    return Backend.objects.create(name="cluster", kind="plain")
