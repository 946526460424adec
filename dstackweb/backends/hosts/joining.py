"""How another machine becomes a host: a one-time token, and the environment that it is exchanged for.

The token grants the database, the broker and the secret key, and so everything that the server can do. Only deployment
admins make one, it expires within the hour, and it is refused on unencrypted networks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core import signing
from django.db import connection, transaction
from django.db.models import QuerySet
from django.utils import timezone

import dstackweb
from dstackweb.accounts.models import User
from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Host, HostInvite, check_host_name
from dstackweb.lib.errors import Conflict, Forbidden, Invalid, NotFound
from dstackweb.lib.network import is_exposed, is_local, is_loopback
from dstackweb.lib.secrets import digest, new_token
from dstackweb.spec.labels import check_labels

TTL = timedelta(hours=1)
HOST_SALT = "dstackweb.host"
SHARED = (
    "DSTACKWEB_CLUSTER_CONTROL", "DSTACKWEB_CLUSTER_CLOUD", "DSTACKWEB_HOST_SILENT_S", "DSTACKWEB_LOST_AFTER_S",
    "DSTACKWEB_WATCH_EVERY_S", "DSTACKWEB_SAMPLE_EVERY_S", "DSTACKWEB_RUN_DIRS_DAYS",
    "DSTACKWEB_JOB_FILES_HOURS",
)  # fmt: skip
"""Settings that all machines of the deployment share."""
_PORTS = {"postgres": 5432, "postgresql": 5432, "redis": 6379, "rediss": 6379}


@dataclass(frozen=True)
class JoinRequest:
    """A machine that wants to join. `url` is the server's, as the machine reached it; `insecure` allows plain HTTP."""

    name: str
    url: str
    version: str = dstackweb.__version__
    insecure: bool = False
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Reach:
    """A service that the machine must reach, and its setting."""

    what: str
    host: str
    port: int
    setting: str


def invite(by: User) -> tuple[HostInvite, str]:
    """A one-time invite and its token, which is not stored. Raises Conflict if no machine could join."""
    if (obstacle := needs_postgres()) is not None:
        raise Conflict(obstacle)
    token = new_token("dwj")
    row = HostInvite.objects.create(created_by=by, digest=digest(token), expires_at=timezone.now() + TTL)
    return row, token


def withdraw(invite_id: int) -> None:
    """Withdraw an unused invite. Raises NotFound."""
    deleted, _ = HostInvite.objects.filter(pk=invite_id, used_at=None).delete()
    if not deleted:
        raise NotFound("This join token has been used or withdrawn already.")


def open_invites() -> QuerySet[HostInvite]:
    """Unused and not expired, newest first."""
    return HostInvite.objects.filter(used_at=None, expires_at__gt=timezone.now()).select_related("created_by")


def of_token(token: str) -> HostInvite:
    """The valid invite of a token. Raises Forbidden, also if its creator is no longer an admin."""
    row = HostInvite.objects.select_related("created_by").filter(digest=digest(token)).first()
    again = "make a new one on the hosts page"
    if row is None:
        raise Forbidden(f"this join token doesn't exist or was withdrawn; {again}")
    if row.used_at is not None:
        raise Forbidden(f"this join token was used already by {row.host_name}, and each works once; {again}")
    if row.expires_at <= timezone.now():
        raise Forbidden(f"this join token has expired; {again}")
    if not (row.created_by.is_superuser and row.created_by.is_active):
        raise Forbidden("the creator of this join token is no longer an admin of the deployment; ask for a new one")
    return row


def host_token(name: str) -> str:
    """A token by which a host proves to the API that it has the secret key."""
    return signing.Signer(salt=HOST_SALT).sign(name)


def host_of_token(token: str) -> str | None:
    """The host's name in a valid token, else None."""
    try:
        return signing.Signer(salt=HOST_SALT).unsign(token)
    except signing.BadSignature:
        return None


def needs_postgres() -> str | None:
    """Why no other machine can join this server; None if one can."""
    if connection.vendor == "postgresql":
        return None
    return (
        "a second machine needs PostgreSQL: this server keeps its data in an SQLite file, which only its own machine "
        "can open. Set DATABASE_URL on the server and start it again"
    )


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
    if host is not None and is_online(host):
        found.append(f"a host called {machine.name} is online: stop it, or give this machine another --name")
    return found


def elsewhere(url: str, *, insecure: bool = False) -> list[str]:
    """Why the server's settings keep out a machine that reaches it at `url`.

    Loopback addresses are enough for a second host on the server's own machine, whose `url` is one, too.
    """
    found = [why] if (why := needs_postgres()) is not None else []
    api = settings.DSTACKWEB_API_URL
    if not is_local(url):
        found += [
            f"the server reaches its {there.what} at {there.host or 'a socket'}, where no other machine can: "
            f"set {there.setting} on the server to an address that both reach"
            for there in services()
            if is_loopback(there.host)
        ]
        if is_local(api):
            found.append(
                f"no other machine reaches the server at {api}, where runners would look for it: "
                "set DSTACKWEB_PUBLIC_URL on the server to its https:// address"
            )
    exposed = next((address for address in (url, api) if is_exposed(address)), None)
    if exposed and not insecure:
        found.append(
            f"{exposed} is not encrypted: the deployment's keys and each job's token could be read on the way. "
            "Give the server HTTPS (DSTACKWEB_PUBLIC_URL), or join with --insecure on a network that you trust"
        )
    return found


def services() -> list[Reach]:
    """The server's database and broker."""
    found = []
    if connection.vendor == "postgresql":
        values = connection.settings_dict
        port = int(values["PORT"] or _PORTS["postgresql"])
        found.append(Reach("PostgreSQL", str(values["HOST"]), port, "DATABASE_URL"))
    if settings.REDIS_URL:
        parts = urlsplit(settings.REDIS_URL)
        found.append(Reach("Redis", parts.hostname or "", parts.port or _PORTS["redis"], "REDIS_URL"))
    return found


def join(row: HostInvite, machine: JoinRequest) -> dict[str, str]:
    """Use the invite; returns the environment that makes the machine a host.

    Raises Conflict with all obstacles, Invalid, and Forbidden if it was used meanwhile; a refusal does not use it.
    """
    if found := obstacles(machine):
        raise Conflict("; ".join(found), obstacles=found)
    with transaction.atomic():
        now = timezone.now()
        unused = HostInvite.objects.filter(pk=row.pk, used_at=None, expires_at__gt=now)
        if not unused.update(used_at=now, host_name=machine.name):
            raise Forbidden("this join token was used already, and each works once; make a new one on the hosts page")
    return environment(machine)


def environment(machine: JoinRequest) -> dict[str, str]:
    """The environment of `manage.py host` on another machine."""
    given: dict[str, Any] = {
        "DATABASE_URL": settings.DATABASE_URL,
        "REDIS_URL": settings.REDIS_URL,
        "DSTACKWEB_SECRET_KEY": settings.SECRET_KEY,
        "DSTACKWEB_PUBLIC_URL": settings.DSTACKWEB_API_URL,
        "DSTACKWEB_HOST_NAME": machine.name,
        "DSTACKWEB_INSECURE_HTTP": "1" if is_exposed(settings.DSTACKWEB_API_URL) else "",
        **{name: os.environ.get(name, "") for name in SHARED},
    }
    return {name: value for name, value in given.items() if value}
