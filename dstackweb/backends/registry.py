"""Which code serves which kind of backend."""

from __future__ import annotations

from dstackweb.backends import contract, models
from dstackweb.backends.hosts.backend import HostsBackend


class UnknownKind(Exception):
    """No code serves this kind of backend here."""


KINDS = {models.BackendKind.HOSTS.value: HostsBackend}


def driver(backend: models.Backend) -> contract.Backend:
    """The code behind a configured backend. Raises UnknownKind."""
    try:
        kind = KINDS[backend.kind]
    except KeyError:
        raise UnknownKind(f"backend {backend.name}: nothing here serves the kind {str(backend.kind)!r}") from None
    return kind(backend)
