"""The PATH that agents give their jobs."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from dstackweb.runner.agent import job_path


def test_the_path_for_jobs_is_found_without_taking_on_their_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rights of one thread are those of all: meanwhile no other could make a job's folder."""

    def refuse(*_: object) -> None:
        raise AssertionError("this changes the rights of all threads")

    for name in ("seteuid", "setegid", "setgroups"):
        monkeypatch.setattr(os, name, refuse)
    (tmp_path / "closed").mkdir(0o700)
    monkeypatch.setenv("PATH", f"/usr/bin:{tmp_path}/closed:/bin:/none:relative")
    assert job_path(pwd.getpwnam("nobody")) == "/usr/bin:/bin"
    assert job_path(None) == f"/usr/bin:{tmp_path}/closed:/bin"
