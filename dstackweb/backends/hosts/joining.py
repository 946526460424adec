"""How another machine becomes a host: an admin's one-time token, of which only a digest is stored, is exchanged for one
of this host alone. That ends when the host is removed, joins again, or an admin revokes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

import dstackweb
from dstackweb.accounts.models import User
from dstackweb.backends.hosts.inventory import ensure_embedded_backend, is_online
from dstackweb.backends.models import Host, HostEvent, HostEventKind, HostInvite, check_host_name
from dstackweb.lib.errors import Conflict, Forbidden, Invalid, NotFound
from dstackweb.lib.network import is_exposed, is_local
from dstackweb.lib.secrets import digest, new_token
from dstackweb.spec.labels import check_labels

TTL = timedelta(hours=1)


@dataclass(frozen=True)
class JoinRequest:
    """A machine that wants to join. `url` is the server's, as the machine reached it; `insecure` allows plain HTTP.

    `nonce` is the machine's own: with it, it may repeat a join whose answer was lost.
    """

    name: str
    url: str
    version: str = dstackweb.__version__
    insecure: bool = False
    labels: Mapping[str, str] | None = None
    nonce: str = ""


def invite(by: User) -> tuple[HostInvite, str]:
    """A one-time invite and its token, which is not stored."""
    token = new_token("dwj")
    row = HostInvite.objects.create(created_by=by, digest=digest(token), expires_at=timezone.now() + TTL)
    return row, token


def withdraw(invite_id: int) -> None:
    """Withdraw an unused invite. Raises NotFound."""
    deleted, _rows = HostInvite.objects.filter(pk=invite_id, used_at=None).delete()
    if not deleted:
        raise NotFound(_("This join token has been used or withdrawn already."))


def open_invites() -> QuerySet[HostInvite]:
    """Unused and not expired, newest first."""
    return HostInvite.objects.filter(used_at=None, expires_at__gt=timezone.now()).select_related("created_by")


def of_token(token: str) -> HostInvite:
    """The invite of a token, valid or used. Raises Forbidden, also if its creator is no longer an admin."""
    row = HostInvite.objects.select_related("created_by").filter(digest=digest(token)).first()
    if row is None:
        raise Forbidden(_("this join token doesn't exist or was withdrawn; make a new one on the hosts page"))
    if row.expires_at <= timezone.now():
        raise Forbidden(_("this join token has expired; make a new one on the hosts page"))
    if not (row.created_by.is_superuser and row.created_by.is_active):
        raise Forbidden(_("the creator of this join token is no longer an admin of the deployment; ask for a new one"))
    return row


def obstacles(machine: JoinRequest) -> list[str]:
    """All reasons on the server's side why a machine cannot join, each in one line. Raises Invalid."""
    place = "name"
    try:
        check_host_name(machine.name)
        place = "labels"
        check_labels(machine.labels or {})
    except ValueError as error:
        raise Invalid.at(place, msg=str(error)) from None
    found = elsewhere(machine.url, insecure=machine.insecure)
    if machine.version != dstackweb.__version__:
        found.append(
            f"the machine has dstackweb {machine.version} and the server {dstackweb.__version__}: "
            "install the server's version there"
        )
    host = Host.joined.filter(name=machine.name).first()
    if host is not None and host.cluster:
        found.append(f"{machine.name} is the server's own machine: give this machine another --name")
    elif host is not None and host.token_digest and is_online(host):
        found.append(f"a host called {machine.name} is online: stop it, or give this machine another --name")
    return found


def loopback(url: str) -> list[str]:
    """Why no machine but the server's own could use the server's `url`."""
    if not is_local(url):
        return []
    return [
        f"no other machine reaches the server at {url}: set DSTACKWEB_PUBLIC_URL to its https:// address, or open this "
        "page at the server's address in your network"
    ]


def elsewhere(url: str, *, insecure: bool = False) -> list[str]:
    """Why a machine that reaches the server at `url` cannot join."""
    if not is_exposed(url) or insecure:
        return []
    return [
        f"{url} is not encrypted: the host's token and each job's could be read on the way. Give the server HTTPS "
        "(DSTACKWEB_PUBLIC_URL), or join with --insecure on a network that you trust"
    ]


def join(row: HostInvite, machine: JoinRequest) -> str:
    """Use the invite; returns the host's own token, and ends the one that it had. The same nonce may repeat the call.

    Raises Conflict with all obstacles, Invalid, and Forbidden if it was used meanwhile; a refusal does not use it.
    """
    if not (machine.nonce and row.nonce == machine.nonce and row.host_name == machine.name):
        check_unused(row)
        if found := obstacles(machine):
            raise Conflict("; ".join(found), obstacles=found)
    token, now = new_token("dwh"), timezone.now()
    with transaction.atomic():
        mine = HostInvite.objects.filter(pk=row.pk, used_at=row.used_at, expires_at__gt=now)
        if not mine.update(used_at=now, host_name=machine.name, nonce=machine.nonce):
            raise Forbidden(
                _("this join token was used already, and each works once; make a new one on the hosts page")
            )
        host, _created = Host.objects.get_or_create(
            name=machine.name, defaults={"backend": ensure_embedded_backend(), "labels": dict(machine.labels or {})}
        )
        labels = {**host.labels, **(machine.labels or {})}
        back = {} if host.left_at is None else {"left_at": None, "leaving": False, "draining": False}
        Host.objects.filter(pk=host.pk).update(
            token_digest=digest(token), agent_process="", cluster="", labels=labels, **back
        )
        if row.used_at is None:
            HostEvent.objects.create(host=host, kind=HostEventKind.ADMITTED, actor=row.created_by, at=now)
    return token


def check_unused(row: HostInvite) -> None:
    """Raises Forbidden if the invite was used."""
    if row.used_at is not None:
        raise Forbidden(
            _("this join token was used already by %(host_name)s, and each works once; make a new one")
            % {"host_name": row.host_name}
        )


def revoke(host: Host, by: User) -> None:
    """End the token of a host's agent: the machine must join again. Its running jobs continue. Raises Conflict."""
    if host.cluster:
        raise Conflict(_("%(host)s is the server's own machine and has no token") % {"host": host.name})
    with transaction.atomic():
        if Host.objects.filter(pk=host.pk).exclude(token_digest="").update(token_digest=""):
            HostEvent.objects.create(host=host, kind=HostEventKind.REVOKED, actor=by)
    host.refresh_from_db()
