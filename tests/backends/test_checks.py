"""Start-up checks."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from dstackweb.backends import registry
from dstackweb.backends.apps import check_kinds
from dstackweb.scheduler.management.commands import up


def test_a_start_without_the_built_in_kinds_says_to_reinstall(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_kinds() == []
    monkeypatch.setattr(registry, "KINDS", {})
    monkeypatch.setattr(registry, "BROKEN", {"hosts": "ModuleNotFoundError: No module named 'dstackweb.gone'"})
    with pytest.raises(SystemCheckError) as refused:
        call_command("check", tags=up.Command.requires_system_checks)
    assert "No module named 'dstackweb.gone'" in str(refused.value)
    assert "Reinstall it into this environment" in str(refused.value)
