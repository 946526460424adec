"""A cloud for tests: a kind of backend put together from sources, and one that answers by itself.

What they were asked is kept in a file, which all processes of a test write to.
"""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import (
    Availability,
    Hidden,
    Offer,
    OfferPart,
    SourceFailed,
    SourceKey,
    SourceReading,
    SourceSpec,
    SourceState,
)
from dstackweb.backends.models import Backend
from dstackweb.offers import sources
from dstackweb.spec.effective import Requirements
from tests.backends.kinds import use_driver

TYPES, SPOT = SourceKey("types", "eu"), SourceKey("spot", "eu")
TYPES_US = SourceKey("types", "us")
ANY = Requirements()


class Cloud:
    """What its sources say, by key; an exception is raised instead. `during` is called while a fetch is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
        self.says: dict[SourceKey, Any] = {TYPES: ["g5", "g6"], SPOT: {"g5": "0.5"}, TYPES_US: ["p4d"]}
        self.answer: Sequence[Offer] | Exception = (Offer("cluster", "worker", 4, 1024, Availability.IDLE),)
        self.takes_s = 0.0
        self.during: Callable[[], object] = lambda: None
        self.log = log
        log.touch()
        cloud = self

        class Sourced:
            sources = {
                "types": SourceSpec(600.0, list[str], ("families",), ("sizes",)),
                "spot": SourceSpec(60.0, dict[str, str], hides=Hidden.SPOT, tells=OfferPart.PRICE),
            }

            def __init__(self, backend: Backend) -> None:
                self.backend = backend

            def wanted(self) -> list[SourceKey]:
                return sorted(cloud.says)

            def fetch(self, key: SourceKey) -> Any:
                return cloud.ask(f"{key.source} {key.region}", cloud.says[key])

            def join(
                self,
                readings: Mapping[SourceKey, SourceReading],
                requirements: Requirements,
                *,
                image: str | None = None,
            ) -> list[Offer]:
                types = {key: reading for key, reading in readings.items() if key.source == "types"}
                if all(reading.state is SourceState.FAILED for reading in types.values()):
                    raise SourceFailed("service_error", text="nothing is known")
                return [
                    Offer(self.backend.name, name, requirements.cpu_min, 1024, Availability.UNKNOWN, region=key.region)
                    for key, reading in sorted(types.items())
                    for name in reading.value or ()
                ]

        class Plain:
            def __init__(self, backend: Backend) -> None:
                pass

            def offers(self, requirements: Requirements, *, image: str | None = None) -> Sequence[Offer]:
                answer: Sequence[Offer] = cloud.ask(f"offers {requirements.cpu_min}", cloud.answer)
                return answer

        use_driver(monkeypatch, "aws", Sourced)
        use_driver(monkeypatch, "plain", Plain)

    def ask(self, what: str, answer: Any) -> Any:
        with open(self.log, "ab", buffering=0) as file:
            file.write(f"{what}\n".encode())
        during, self.during = self.during, lambda: None
        during()
        time.sleep(self.takes_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines()


class Clock:
    """The time as the product reads it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = timezone.now()
        monkeypatch.setattr(timezone, "now", lambda: self.now)

    def pass_s(self, seconds: float) -> dt.datetime:
        self.now += dt.timedelta(seconds=seconds)
        return self.now


def at_once(number: int, act: Callable[[], Any]) -> list[Any]:
    """What `act` returns or raises in so many threads that begin together."""
    barrier, found = threading.Barrier(number), []

    def run() -> None:
        barrier.wait()
        try:
            found.append(act())
        except Exception as error:
            found.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def fork(act: Callable[[], object]) -> int:
    """Run it in a process of its own, which ends with 0 if all went well; returns its pid."""
    connections.close_all()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        act()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        connections.close_all()
        os._exit(code)


def all_ended(pids: Sequence[int]) -> bool:
    """Whether all these processes ended well."""
    return all(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in pids)


def read(backend: Backend, key: SourceKey) -> SourceReading:
    """What is known of one source."""
    driver: object = registry.driver(backend)
    assert sources.is_sourced(driver)
    return sources.read_all(backend, driver, [key])[key]
