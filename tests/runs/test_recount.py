"""`manage.py recount --check` while others keep counting."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.management import call_command
from django.db import connection

from dstackweb.progress.counters import ensure_scope
from dstackweb.progress.models import Scope
from dstackweb.progress.recount import Difference
from dstackweb.scheduler.management.commands import recount
from tests.factories import make_project


@pytest.mark.django_db(transaction=True)
def test_a_recount_reads_one_snapshot_and_blocks_no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_project()

    def write(number: int) -> None:
        try:
            ensure_scope(project.pk, number, 1)
        finally:
            connection.close()

    def differences() -> Iterator[Difference]:
        before = Scope.objects.count()
        with ThreadPoolExecutor(1) as other:
            other.submit(write, before + 1).result()
        if (after := Scope.objects.count()) != before:
            yield Difference("scopes", before, after)

    monkeypatch.setattr(recount, "differences", differences)
    for _ in range(2):
        call_command("recount", "--check")
    assert Scope.objects.count() == 2
