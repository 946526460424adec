"""Which code serves which kind of backend."""

from __future__ import annotations

from dstackweb.backends import contract, models
from dstackweb.backends.aws.backend import AwsBackend
from dstackweb.backends.hosts.backend import HostsBackend


class UnknownKind(Exception):
    """No code serves this kind of backend here."""


KINDS: dict[str, type[contract.Backend | contract.Sourced]] = {
    models.BackendKind.HOSTS.value: HostsBackend,
    models.BackendKind.AWS.value: AwsBackend,
}


def driver(backend: models.Backend) -> contract.Backend | contract.Sourced:
    """The code behind a configured backend. Raises UnknownKind."""
    try:
        kind = KINDS[backend.kind]
    except KeyError:
        raise UnknownKind(f"backend {backend.name}: nothing here serves the kind {str(backend.kind)!r}") from None
    make: type = kind
    code: contract.Backend | contract.Sourced = make(backend)
    return code


def hosts(backend: models.Backend) -> contract.Hosts:
    """The code of a backend that starts runners on machines that are there. Raises UnknownKind."""
    code = driver(backend)
    if not isinstance(code, contract.Hosts):
        raise UnknownKind(f"backend {backend.name} starts no runners by itself")
    return code


def cloud(backend: models.Backend) -> contract.Cloud:
    """The code of a backend that starts machines. Raises UnknownKind."""
    code = driver(backend)
    if not isinstance(code, contract.Cloud):
        raise UnknownKind(f"backend {backend.name} starts no machines")
    return code


def cloud_kinds() -> list[str]:
    """The kinds of backends that start machines."""
    return [kind for kind, code in KINDS.items() if issubclass(code, contract.Cloud)]
