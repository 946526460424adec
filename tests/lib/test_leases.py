from __future__ import annotations

import datetime as dt
import threading

import pytest
from django.db import connections
from django.utils import timezone

from dstackweb.lib.models import Lease

NOW = timezone.now()
S = dt.timedelta(seconds=1)

pytestmark = pytest.mark.django_db


def test_only_one_process_holds_a_lease_until_it_is_released() -> None:
    assert Lease.take("offers", "a", 5, NOW)
    assert Lease.take("offers", "a", 5, NOW)
    assert not Lease.take("offers", "b", 5, NOW)
    Lease.release("offers", "b")
    assert not Lease.take("offers", "b", 5, NOW)
    Lease.release("offers", "a")
    assert Lease.take("offers", "b", 5, NOW)


def test_the_lease_of_a_dead_holder_blocks_others_only_until_it_expires() -> None:
    Lease.take("offers", "a", 5, NOW)
    assert not Lease.take("offers", "b", 5, NOW + 4.9 * S)
    assert Lease.take("offers", "b", 5, NOW + 5 * S)


def test_a_renewed_lease_is_kept_and_a_lost_one_cannot_be_renewed() -> None:
    Lease.take("offers", "a", 5, NOW)
    assert Lease.renew("offers", "a", 5, NOW + 4 * S)
    assert not Lease.take("offers", "b", 5, NOW + 8 * S)
    assert Lease.take("offers", "b", 5, NOW + 9 * S)
    assert not Lease.renew("offers", "a", 5, NOW + 9 * S)


def test_a_lease_from_before_a_clock_was_put_back_is_void() -> None:
    Lease.take("offers", "a", 5, NOW + dt.timedelta(hours=1))
    assert Lease.take("offers", "b", 5, NOW)


@pytest.mark.django_db(transaction=True)
def test_of_twenty_concurrent_processes_one_gets_the_lease() -> None:
    won: list[str] = []
    barrier = threading.Barrier(20)

    def try_it(name: str) -> None:
        barrier.wait()
        if Lease.take("offers", name, 5, NOW):
            won.append(name)
        connections.close_all()

    threads = [threading.Thread(target=try_it, args=(str(n),)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [Lease.objects.get().holder] == won


@pytest.mark.django_db(transaction=True)
def test_under_contention_a_lease_is_never_held_by_two() -> None:
    failed: list[BaseException] = []
    inside: list[str] = []

    def try_it(name: str) -> None:
        try:
            for _ in range(25):
                if Lease.take("offers", name, 5, NOW):
                    inside.append(name)
                    assert inside == [name]
                    inside.clear()
                    Lease.release("offers", name)
        except BaseException as error:
            failed.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=try_it, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert not Lease.objects.exists()
