"""Creating, changing and deleting backends. Secrets are never returned."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import ProtectedError
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.backends import registry
from dstackweb.backends.contract import InstanceEnd
from dstackweb.backends.kinds import Kind
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.lib.errors import Conflict, FieldError, Invalid, NotFound


def find(name: str) -> Backend:
    """The backend of that name. Raises NotFound."""
    found = Backend.objects.filter(name=name).first()
    if found is None:
        raise NotFound(_("backend %(name)s does not exist") % {"name": repr(name[:80])})
    return found


def put(name: str, kind: str, config: Mapping[str, Any], *, enabled: bool = True) -> tuple[Backend, bool]:
    """Create a backend or replace its settings; also whether it is new. Repeating it changes nothing.

    A missing secret stays, if it belongs to the same access key. Raises Invalid, each error with its place in `type` or
    `config`, and Conflict if the name belongs to a backend of another kind.
    """
    if kind not in registry.KINDS:
        raise Invalid.at(
            "type",
            msg=_("`type` should be one of %(kinds)s, not %(kind)s")
            % {"kinds": ", ".join(sorted(registry.KINDS)), "kind": repr(kind[:80])},
        )
    with transaction.atomic():
        current = Backend.objects.select_for_update(no_key=True).filter(name=name).first()
        if current is not None and current.kind != kind:
            raise Conflict(
                _("%(name)s is a backend of the type %(kind)s: delete it first, or choose another name")
                % {"name": name, "kind": current.kind}
            )
        kept = current.secret if current is not None else ""
        settled, secret = _settle(kind, config, kept)
        if current is None:
            try:
                with transaction.atomic():
                    fields = {"config": settled, "secret": secret, "enabled": enabled}
                    return Backend.objects.create(name=name, kind=kind, **fields), True
            except IntegrityError:
                raise Conflict(
                    _("a backend named %(name)s was just created by someone else") % {"name": name}
                ) from None
        # Each time a secret is encrypted it looks different.
        same_secret = secret == kept or (bool(kept) and Kind.secrets_of(secret) == Kind.secrets_of(kept) != {})
        if (settled, same_secret, enabled) != (current.config, True, current.enabled):
            current.config, current.enabled = settled, enabled
            current.secret = kept if same_secret else secret
            current.version += 1
            current.save(update_fields=["config", "enabled", "secret", "version"])
        return current, False


def delete(name: str) -> None:
    """Delete a backend: its offers vanish at once, and its name is free. Raises NotFound, and Conflict for own hosts.

    If past jobs or instances refer to it, its row is kept but hidden, and its secret while it may have instances to
    terminate (`forget_secrets`). Idle ones end now, the others after their jobs.
    """
    with transaction.atomic():
        backend = find(name)
        if registry.is_hosts(backend):
            raise Conflict(_("own hosts cannot be deleted as a backend: remove each host, or disable the backend"))
        # Before the backend's row: assigning an instance to a job locks in this order, too.
        idle = Instance.objects.filter(backend=backend, holder=None, status=InstanceStatus.RUNNING)
        idle.update(status=InstanceStatus.STOPPING, status_s=0, why=InstanceEnd.DELETED)
        held = Backend.objects.select_for_update().filter(pk=backend.pk).first()
        if held is None:
            raise NotFound(_("backend %(name)s does not exist") % {"name": repr(name)})
        backend = held
        try:
            with transaction.atomic():
                backend.delete()
        except ProtectedError:
            backend.deleted_at, backend.enabled = timezone.now(), False
            backend.version += 1
            backend.save(update_fields=["deleted_at", "enabled", "version"])


def forget_secrets(deleted_before: dt.datetime) -> None:
    """Erase secrets of backends deleted before then whose instances have all ended."""
    deleted = Backend.with_deleted.filter(deleted_at__lt=deleted_before).exclude(secret="")
    needed = set(Instance.objects.exclude(status=InstanceStatus.GONE).values_list("backend_id", flat=True))
    useless = [pk for pk in deleted.values_list("pk", flat=True) if pk not in needed]
    Backend.with_deleted.filter(pk__in=useless, deleted_at__lt=deleted_before).update(secret="")


def _settle(kind: str, config: Mapping[str, Any], stored: str) -> tuple[dict[str, Any], str]:
    try:
        return registry.KINDS[kind].settle(config, stored)
    except Invalid as error:
        placed: list[FieldError] = [{**one, "loc": ["config", *one["loc"]]} for one in error.errors]
        raise Invalid(error.detail, placed) from None
