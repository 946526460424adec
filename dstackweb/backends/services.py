"""What deployment admins do with backends: set one up, change it, delete it. Secrets go in and never come out."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import ProtectedError
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import InstanceEnd
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.lib.errors import Conflict, DomainError, FieldError, Invalid, NotFound
from dstackweb.lib.secrets import decrypt


def find(name: str) -> Backend:
    """The backend of that name. Raises NotFound."""
    found = Backend.objects.filter(name=name).first()
    if found is None:
        raise NotFound(f"backend {name[:80]!r} does not exist")
    return found


def put(name: str, kind: str, config: Mapping[str, Any], *, enabled: bool = True) -> tuple[Backend, bool]:
    """Set a backend up, or change all that is set of it; also whether it is new. The same again changes nothing.

    A secret that isn't said stays, if it belongs to the same access key. Raises Invalid, each error with its place
    in `type` or `config`, and Conflict where the name belongs to a backend of another kind.
    """
    if kind not in registry.KINDS:
        raise Invalid.at("type", msg=f"`type` should be one of {', '.join(sorted(registry.KINDS))}, not {kind[:80]!r}")
    with transaction.atomic():
        current = Backend.objects.select_for_update(no_key=True).filter(name=name).first()
        if current is not None and current.kind != kind:
            raise Conflict(f"{name} is a backend of the type {current.kind}: delete it first, or choose another name")
        kept = current.secret if current is not None else ""
        settled, secret = _settle(kind, config, kept)
        if current is None:
            return _create(name, kind, settled, secret, enabled), True
        same_secret = _plain(secret) == _plain(kept)
        if (settled, same_secret, enabled) != (current.config, True, current.enabled):
            current.config, current.enabled = settled, enabled
            current.secret = kept if same_secret else secret
            current.version += 1
            current.save(update_fields=["config", "enabled", "secret", "version"])
        return current, False


def delete(name: str) -> None:
    """Delete a backend: its offers are gone at once, and its name is free. Raises NotFound, and Conflict for own hosts.

    One that jobs or instances of the past name keeps its row, unseen, and its secret for as long as it may have
    instances to end (`forget_secrets`): those that serve nobody end now, the others with their jobs.
    """
    with transaction.atomic():
        backend = find(name)
        if registry.is_hosts(backend):
            raise Conflict("own hosts cannot be deleted as a backend: remove each host, or disable the backend")
        # Before the backend's row is held: who gives a job an instance has that first as well.
        idle = Instance.objects.filter(backend=backend, holder=None, status=InstanceStatus.RUNNING)
        idle.update(status=InstanceStatus.STOPPING, status_s=0, why=InstanceEnd.DELETED)
        held = Backend.objects.select_for_update().filter(pk=backend.pk).first()
        if held is None:
            raise NotFound(f"backend {name!r} does not exist")
        backend = held
        try:
            with transaction.atomic():
                backend.delete()
        except ProtectedError:
            backend.deleted_at, backend.enabled = timezone.now(), False
            backend.version += 1
            backend.save(update_fields=["deleted_at", "enabled", "version"])


def forget_secrets(deleted_before: dt.datetime) -> None:
    """Backends that were deleted before then, and whose instances have all gone, no longer need theirs."""
    deleted = Backend.with_deleted.filter(deleted_at__lt=deleted_before).exclude(secret="")
    needed = set(Instance.objects.exclude(status=InstanceStatus.GONE).values_list("backend_id", flat=True))
    useless = [pk for pk in deleted.values_list("pk", flat=True) if pk not in needed]
    Backend.with_deleted.filter(pk__in=useless, deleted_at__lt=deleted_before).update(secret="")


def _create(name: str, kind: str, config: dict[str, Any], secret: str, enabled: bool) -> Backend:
    try:
        with transaction.atomic():
            return Backend.objects.create(name=name, kind=kind, config=config, secret=secret, enabled=enabled)
    except IntegrityError:
        raise Conflict(f"a backend named {name} was just created by someone else") from None


def _settle(kind: str, config: Mapping[str, Any], stored: str) -> tuple[dict[str, Any], str]:
    try:
        return registry.KINDS[kind].settle(config, stored)
    except Invalid as error:
        placed: list[FieldError] = [{**one, "loc": ["config", *one["loc"]]} for one in error.errors]
        raise Invalid(error.detail, placed) from None


def _plain(secret: str) -> Any:
    """What a stored secret says; each time it is encrypted it looks different. None for one that can't be read."""
    try:
        return json.loads(decrypt(secret)) if secret else {}
    except DomainError:
        return None
