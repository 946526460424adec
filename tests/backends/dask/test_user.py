"""Whose user the jobs of a Dask cluster have."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dstackweb.backends import registry, services
from dstackweb.backends.contract import InstanceOrder, LaunchFailed
from dstackweb.backends.dask.kind import DaskBackend, Gpu
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid


@pytest.mark.django_db
def test_no_job_gets_the_servers_user_unless_an_admin_allows_it(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.DSTACKWEB_SHARED_UID = False
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    config = {"projects": ["main"], "scheduler": "tcp://127.0.0.1:9"}
    backend, _is_new = services.put("cluster", "dask", config)
    with pytest.raises(LaunchFailed, match="DSTACKWEB_SHARED_UID"):
        registry.cloud(backend).launch(InstanceOrder("u-1", "mine", "cluster", "cpu", False, ""))
    assert registry.KINDS["dask"].test_connection(config, "").state == "failed"
    assert not DaskBackend(Backend(config={"scheduler": "tcp://dask.example:8786"})).shares_servers_user
    settings.DSTACKWEB_SHARED_UID = True
    assert not DaskBackend(backend).shares_servers_user


@pytest.mark.django_db
def test_resources_that_count_gpus_are_named_with_model_and_memory() -> None:
    config = {"projects": ["main"], "scheduler": "tcp://127.0.0.1:9"}
    backend, _is_new = services.put("cluster", "dask", {**config, "gpus": ["GPU=A100:80GB"]})
    assert DaskBackend(backend).gpus == [Gpu("GPU", "A100", 81920)]
    for wrong in (["=A100"], ["GPU=A100:many"]):
        with pytest.raises(Invalid):
            services.put("cluster", "dask", {**config, "gpus": wrong})
