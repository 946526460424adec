"""How another machine of the team becomes a host: a token that works once, and what the machine then needs.

Whoever uses the token gets the database, the broker and the secret key, and with these everything that the server can
do. So only deployment admins make one, it expires within the hour, and it is refused where it would be read on the way.
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
)  # fmt: skip
"""Settings of the deployment that each machine has alike, where the server has them."""
_PORTS = {"postgres": 5432, "postgresql": 5432, "redis": 6379, "rediss": 6379}


@dataclass(frozen=True)
class JoinRequest:
    """A machine that wants to join. `url` is where it reached the server, `insecure` allows plain HTTP there."""

    name: str
    url: str
    version: str = dstackweb.__version__
    insecure: bool = False
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Reach:
    """A service that the machine itself must reach: what it is, where, and the setting that says so."""

    what: str
    host: str
    port: int
    setting: str


def invite(by: User) -> tuple[HostInvite, str]:
    """A one-time invite for a machine and its token, which is in no row. Raises Conflict where none could join."""
    if (obstacle := needs_postgres()) is not None:
        raise Conflict(obstacle)
    token = new_token("dwj")
    row = HostInvite.objects.create(created_by=by, digest=digest(token), expires_at=timezone.now() + TTL)
    return row, token


def withdraw(invite_id: int) -> None:
    """Make an unused invite worthless. Raises NotFound if there is none."""
    deleted, _ = HostInvite.objects.filter(pk=invite_id, used_at=None).delete()
    if not deleted:
        raise NotFound("This join token has been used or withdrawn already.")


def open_invites() -> QuerySet[HostInvite]:
    """Those that would still let a machine in, newest first."""
    return HostInvite.objects.filter(used_at=None, expires_at__gt=timezone.now()).select_related("created_by")


def of_token(token: str) -> HostInvite:
    """The invite of a token that would work now. Raises Forbidden if unknown, used, expired or no longer backed."""
    row = HostInvite.objects.select_related("created_by").filter(digest=digest(token)).first()
    again = "make a new one on the hosts page"
    if row is None:
        raise Forbidden(f"this join token doesn't exist or was withdrawn; {again}")
    if row.used_at is not None:
        raise Forbidden(f"this join token was used already by {row.host_name}, and each works once; {again}")
    if row.expires_at <= timezone.now():
        raise Forbidden(f"this join token has expired; {again}")
    if not (row.created_by.is_superuser and row.created_by.is_active):
        raise Forbidden("whoever made this join token is no longer an admin of the deployment; ask for a new one")
    return row


def host_token(name: str) -> str:
    """What a host shows the API to prove that both have the same secret key."""
    return signing.Signer(salt=HOST_SALT).sign(name)


def host_of_token(token: str) -> str | None:
    """The name of the host that made a token; None for any other string."""
    try:
        return signing.Signer(salt=HOST_SALT).unsign(token)
    except signing.BadSignature:
        return None


def needs_postgres() -> str | None:
    """Why no other machine can ever join this server as it is set up; None where one can."""
    if connection.vendor == "postgresql":
        return None
    return (
        "a second machine needs PostgreSQL: this server keeps its data in an SQLite file, which only its own machine "
        "can open. Set DATABASE_URL on the server and start it again"
    )


def obstacles(machine: JoinRequest) -> list[str]:
    """Everything on the server's side that keeps a machine from joining, each in one line. Raises Invalid."""
    _check(machine)
    return [*elsewhere(machine.url, insecure=machine.insecure), *_of_the_machine(machine)]


def elsewhere(url: str, *, insecure: bool = False) -> list[str]:
    """What in the server's settings keeps a machine out that reaches it at `url`.

    Loopback addresses will do for a second host on the server's own machine, which is one that uses such a `url`.
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


def _check(machine: JoinRequest) -> None:
    try:
        check_host_name(machine.name)
    except ValueError as error:
        raise Invalid.at("name", msg=str(error)) from None
    try:
        check_labels(machine.labels or {})
    except ValueError as error:
        raise Invalid.at("labels", msg=str(error)) from None


def _of_the_machine(machine: JoinRequest) -> list[str]:
    found = []
    if machine.version != dstackweb.__version__:
        found.append(
            f"the machine has dstackweb {machine.version} and the server {dstackweb.__version__}: "
            "install the server's version there"
        )
    there = Host.joined.filter(name=machine.name).first()
    if there is not None and is_online(there):
        found.append(f"a host called {machine.name} is online: stop it, or give this machine another --name")
    return found


def services() -> list[Reach]:
    """The database and the broker as the server reaches them."""
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
    """Use the invite up; returns the environment that makes the machine a host.

    Raises Conflict with every obstacle, Invalid, and Forbidden to the second of two; a refusal leaves the invite.
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
    """All that `manage.py host` needs on another machine."""
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
