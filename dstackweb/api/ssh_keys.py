"""The caller's SSH keys, with which they connect to their dev environments."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from ninja import Field, Path as PathParam, Router, Schema, Status

from dstackweb.accounts import ssh_keys
from dstackweb.accounts.models import SSHKey
from dstackweb.api.app import caller, refusals
from dstackweb.lib.ssh_keys import host_fingerprint
from dstackweb.runs import connections

router = Router(tags=["deployment"])


class SSHKeyIn(Schema):
    public_key: str = Field(max_length=10_000, description="The line of a file such as `~/.ssh/id_ed25519.pub`")
    name: str = Field("", max_length=80, description="Where it is used; that of the key's comment if empty")


class SSHKeyOut(Schema):
    id: int
    name: str
    fingerprint: str
    public_key: str
    created_at: dt.datetime
    last_used_at: dt.datetime | None


class GatewayOut(Schema):
    """By which people connect. `port` 0: not by SSH."""

    host: str
    port: int
    fingerprint: str = Field(description="Of the gateway's own key, as SSH clients show it when they connect first")


class SSHKeysOut(Schema):
    items: list[SSHKeyOut]
    next: str | None = None
    gateway: GatewayOut


@router.get("/user/ssh-keys", response={200: SSHKeysOut, **refusals()}, summary="The caller's SSH keys")
def keys(request: HttpRequest) -> dict[str, Any]:
    fingerprint = host_fingerprint(Path(settings.DSTACKWEB_HOME))
    gateway = {"host": connections.ssh_host(), "port": settings.DSTACKWEB_SSH_PORT, "fingerprint": fingerprint}
    return {"items": caller(request).ssh_keys.all(), "gateway": gateway}


@router.post("/user/ssh-keys", response={201: SSHKeyOut, **refusals(403, 409, 422)}, summary="Add an SSH key")
def add_key(request: HttpRequest, body: SSHKeyIn) -> Status[SSHKey]:
    """With a token that is not limited: its private key opens all dev environments of its user."""
    return Status(201, ssh_keys.add(caller(request), body.public_key, body.name))


@router.delete("/user/ssh-keys/{key_id}", response={204: None, **refusals(404)}, summary="Remove an SSH key")
def remove_key(request: HttpRequest, key_id: PathParam[int]) -> Status[None]:
    ssh_keys.remove(caller(request), key_id)
    return Status(204, None)
