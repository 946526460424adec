"""The kinds of backends that are installed, and the driver of a configured backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from dstackweb.backends import contract, models
from dstackweb.backends.kinds import ENTRY_POINTS, Kind

if TYPE_CHECKING:
    from typing_extensions import TypeIs

log = logging.getLogger(__name__)


class UnknownKind(Exception):
    """No installed package serves this kind of backend, or its code can't be loaded."""


BROKEN: dict[str, str] = {}
"""Installed kinds that can't be loaded, and why."""


def _load() -> dict[str, Kind]:
    """One kind that can't be loaded leaves the others working."""
    found: dict[str, Kind] = {}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            found[point.name] = _kind_of(point)
        except Exception as error:
            BROKEN[point.name] = f"{type(error).__name__}: {error}"
            log.warning("backend kind %s (%s) can't be loaded", point.name, point.value, exc_info=True)
    return found


def _kind_of(point: EntryPoint) -> Kind:
    kind = point.load()()
    if not isinstance(kind, Kind) or kind.name != point.name:
        raise TypeError(f"{point.value} is not a Kind named {point.name}")
    return kind


KINDS: dict[str, Kind] = _load()


def kind_of(backend: models.Backend) -> Kind:
    """The kind of a configured backend. Raises UnknownKind."""
    try:
        return KINDS[backend.kind]
    except KeyError:
        why = BROKEN.get(backend.kind, "no installed package serves it")
        raise UnknownKind(f"backend {backend.name}: kind {backend.kind!r}: {why}") from None


def driver(backend: models.Backend) -> contract.Backend | contract.Sourced:
    """The driver of a configured backend. Raises UnknownKind."""
    return kind_of(backend).driver(backend)


def hosts(backend: models.Backend) -> contract.Hosts:
    """The driver of a backend that starts runners on existing machines. Raises UnknownKind."""
    code = driver(backend)
    if not isinstance(code, contract.Hosts):
        raise UnknownKind(f"backend {backend.name} starts no runners by itself")
    return code


def cloud(backend: models.Backend) -> contract.Cloud:
    """The driver of a backend that starts instances. Raises UnknownKind."""
    code = driver(backend)
    if not isinstance(code, contract.Cloud):
        raise UnknownKind(f"backend {backend.name} starts no instances")
    return code


def cloud_kinds() -> list[str]:
    return [name for name, kind in KINDS.items() if issubclass(kind.driver_class, contract.Cloud)]


def counted_kinds() -> list[str]:
    """The kinds whose room is counted, so that orders are taken from it."""
    return [name for name, kind in KINDS.items() if is_counted(kind.driver_class)]


def is_counted(driver: object) -> TypeIs[contract.Counted]:
    """Whether a driver, or its class, is a `Counted` one. (Its key is a property, so `issubclass` can't say.)"""
    return all(hasattr(driver, name) for name in ("key", "take", "fetch", "join"))


def cluster(backend: models.Backend) -> tuple[str, str]:
    """Identify the cluster of a backend among all kinds. Raises UnknownKind."""
    kind = kind_of(backend)
    return backend.kind, kind.cluster(backend.config) or f"backend {backend.pk}"


def accounting(backend: models.Backend) -> contract.Accounting:
    """The driver of a backend whose engine may keep accounts. Raises UnknownKind."""
    code = driver(backend)
    if not isinstance(code, contract.Accounting):
        raise UnknownKind(f"backend {backend.name} keeps no accounts")
    return code


def accounting_kinds() -> list[str]:
    return [name for name, kind in KINDS.items() if issubclass(kind.driver_class, contract.Accounting)]


def host_kinds() -> list[str]:
    return [name for name, kind in KINDS.items() if kind.is_hosts]


def is_hosts(backend: models.Backend) -> bool:
    return backend.kind in host_kinds()


def is_machine(backend: models.Backend) -> bool:
    """Whether its instances are machines that can serve another job. Raises UnknownKind."""
    return kind_of(backend).is_machine


def projects(backend: models.Backend) -> Sequence[str] | None:
    """The projects whose jobs share a user there, and that alone may use it; None: each job has a machine.

    Raises UnknownKind.
    """
    return kind_of(backend).projects(backend.config)


def shared_users() -> dict[str, Sequence[str]]:
    """The enabled backends at which jobs of several projects have one user, with these projects."""
    known = models.Backend.objects.filter(enabled=True, kind__in=KINDS).order_by("name")
    return {backend.name: names for backend in known if len(names := projects(backend) or ()) > 1}


def runs_images(backend: models.Backend) -> bool:
    """Whether its instances run jobs in containers, as far as its kind is known."""
    kind = KINDS.get(backend.kind)
    return kind is not None and kind.runs_images(backend.config)


def costs_money(backend: models.Backend) -> bool:
    """Whether its use counts against budgets, as it does for unknown kinds."""
    kind = KINDS.get(backend.kind)
    return kind is None or kind.costs_money
