"""What the conformance suite needs of a kind: its driver, and a hand on the engine behind it."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from dstackweb.backends.contract import Cloud, InstanceOrder

DEPLOYMENT = "d" * 20


class Engine(ABC):
    """One engine with a driver. It starts with no instances of DEPLOYMENT."""

    region = ""
    instance_type = ""
    stays = "exec sleep 300"
    """A shell command with which an instance goes on."""
    ends = "exit 0"
    """One with which it ends by itself."""

    @abstractmethod
    def driver(self) -> Cloud:
        """A driver as a new process makes it."""

    @abstractmethod
    def started(self) -> int:
        """How many instances the engine has ever started, in its own words."""

    @abstractmethod
    def end(self, cloud_id: str) -> None:
        """End an instance with the engine's own means, as a person at its console would."""

    @abstractmethod
    def unreachable(self) -> AbstractContextManager[None]:
        """The engine can't be called meanwhile. Its instances go on."""

    @abstractmethod
    def losing_answers(self) -> AbstractContextManager[None]:
        """The engine carries out what it is asked to, and its answers are lost."""

    @abstractmethod
    def refused(self) -> InstanceOrder:
        """An order that the engine has no capacity for."""

    def throttling(self) -> AbstractContextManager[None] | None:
        """The engine refuses calls because there were too many; None if it never does."""
        return None

    def order(self, command: str = "", **more: Any) -> InstanceOrder:
        """An order for the smallest instance, which goes on unless `command` says otherwise."""
        asked = {
            "instance": str(uuid.uuid4()),
            "deployment": DEPLOYMENT,
            "region": self.region,
            "instance_type": self.instance_type,
            "spot": False,
            "user_data": f"#!/bin/sh\n{command or self.stays}\n",
        }
        return InstanceOrder(**asked | more)
