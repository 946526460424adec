"""A snapshot is of one moment, also on a connection that has yet to be made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection

from dstackweb.accounts.models import Project
from dstackweb.lib.sql import snapshot
from tests.factories import make_project


@pytest.mark.django_db(transaction=True)
def test_a_snapshot_on_a_new_connection_is_consistent_during_writes() -> None:
    make_project("before")

    def looked() -> list[int]:
        try:
            with snapshot():
                seen = [Project.objects.count()]
                with ThreadPoolExecutor() as other:
                    other.submit(written).result()
                return [*seen, Project.objects.count()]
        finally:
            connection.close()

    def written() -> None:
        try:
            make_project("meanwhile")
        finally:
            connection.close()

    with ThreadPoolExecutor() as pool:
        first, second = pool.submit(looked).result()
    assert first == second
    assert Project.objects.count() == first + 1
