"""Large run files of a project take no more than its limit within an hour."""

from __future__ import annotations

import contextlib

import pytest
from django.conf import LazySettings

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import TooMany
from dstackweb.lib.models import Bucket
from dstackweb.runs.models import Run
from dstackweb.runs.services import Submission, submit
from tests.factories import make_project

pytestmark = pytest.mark.django_db
LARGE = "type: task\ncommands:\n- |\n  : " + "x" * 100_000 + "\n"


def submitted(project: Project, user: User, times: int, text: str = LARGE) -> int:
    """How many of so many submissions are taken."""
    before = Run.objects.count()
    for _ in range(times):
        with contextlib.suppress(TooMany):
            submit(project, user, "member", Submission(text))
    return Run.objects.count() - before


def test_large_run_files_are_refused_beyond_the_limit(settings: LazySettings, project: Project, member: User) -> None:
    settings.DSTACKWEB_PROJECT_SUBMIT_MB = 1
    assert submitted(project, member, 8) == 5
    assert submitted(project, member, 3, "type: task\ncommands: [echo hello]\n") == 3, "small ones go on"
    assert submitted(make_project("other"), member, 1) == 1
    Bucket.objects.update(at_us=0)
    assert submitted(project, member, 8) == 5, "an hour later"


def test_values_of_the_environment_count_too(settings: LazySettings, project: Project, member: User) -> None:
    settings.DSTACKWEB_PROJECT_SUBMIT_MB = 1
    large = Submission("type: task\nenv: [DATA]\ncommands: [true]\n", env={"DATA": "x" * 100_000})
    for _ in range(7):
        submit(project, member, "member", large)
    with pytest.raises(TooMany, match=r"main has submitted 1 MB .* Nothing was submitted") as refused:
        submit(project, member, "member", large)
    assert 0 < refused.value.retry_after < 3600


def test_a_small_run_costs_no_row(project: Project, member: User) -> None:
    assert submitted(project, member, 1, "type: task\ncommands: [echo hello]\n") == 1
    assert not Bucket.objects.exists()
