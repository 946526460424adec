"""What people do with hosts: drain, label, have them leave. Each change is one event of the host.

Callers check that the person is an admin of the deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import transaction

from dstackweb.accounts.models import User
from dstackweb.backends.models import Host, HostEvent, HostEventKind
from dstackweb.lib.errors import Conflict, Invalid, NotFound
from dstackweb.spec.labels import check_labels


def find(name: str) -> Host:
    """A host that has not left. Raises NotFound."""
    host = Host.joined.filter(name=name).first()
    if host is None:
        raise NotFound(f"no host is called {name}")
    return host


def set_draining(host: Host, by: User, draining: bool) -> bool:
    """Let running jobs go on and no new ones come, or take jobs again and stay. False where that was so already."""
    with transaction.atomic():
        changed = (
            Host.joined.filter(pk=host.pk)
            .exclude(draining=draining, leaving=False)
            .update(draining=draining, leaving=False)
        )
        if changed:
            _record(host, by, HostEventKind.DRAINED if draining else HostEventKind.UNDRAINED)
    host.refresh_from_db()
    return bool(changed)


def set_labels(host: Host, by: User, changes: Mapping[str, str | None]) -> None:
    """Set these labels, and take away those that are None; others stay. Raises Invalid."""
    with transaction.atomic():
        # On SQLite the transaction has the write lock from its start.
        labels = dict(Host.objects.select_for_update().get(pk=host.pk).labels)
        kept = {name: value for name, value in (labels | dict(changes)).items() if value is not None}
        try:
            kept = check_labels(kept)
        except ValueError as error:
            raise Invalid.at("labels", msg=str(error)) from None
        if kept != labels:
            Host.objects.filter(pk=host.pk).update(labels=kept)
            record_labels(host, by, labels, kept)
    host.refresh_from_db()


def record_labels(host: Host, by: User, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """The event of changed labels: those that were set, and the names of those that went."""
    given = {name: value for name, value in after.items() if before.get(name) != value}
    _record(host, by, HostEventKind.LABELLED, set=given, removed=sorted(set(before) - set(after)))


def leave(host: Host, by: User) -> None:
    """Drain it, and have it leave once no job holds anything of it; the watcher sees to that.

    Raises Conflict for the server's own machine, which would come back with the server.
    """
    if not may_leave(host):
        raise Conflict(f"{host.name} is the server's own machine and can't leave; drain it to keep jobs away")
    with transaction.atomic():
        if Host.joined.filter(pk=host.pk, leaving=False).update(leaving=True, draining=True):
            _record(host, by, HostEventKind.LEAVING)
    host.refresh_from_db()


def may_leave(host: Host) -> bool:
    """Whether it is a machine of its own, and not the server's."""
    return host.cluster != settings.DSTACKWEB_CLUSTERS["control"]


def _record(host: Host, by: User, kind: HostEventKind, **data: Any) -> None:
    HostEvent.objects.create(host=host, kind=kind, actor=by, data=data)
