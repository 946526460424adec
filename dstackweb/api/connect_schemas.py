"""Schemas of how people and programs reach what runs serve."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from django.conf import settings
from ninja import Field, Schema

from dstackweb.runs import connections
from dstackweb.runs.models import Run
from dstackweb.runs.service_codes import ServiceState
from dstackweb.wording import gateway


class ConnectOut(Schema):
    """How to connect to a dev environment or a hold, through the server's gateway."""

    ready: Annotated[bool, Field(description="Whether its runner is connected to the gateway now")]
    ssh: Annotated[str | None, Field(description="The command; null without SSH")]
    vscode: Annotated[str | None, Field(description="A link that opens it in VS Code")]
    url: Annotated[str | None, Field(description="The dashboard's address that opens JupyterLab in a browser")]
    used_at: Annotated[dt.datetime | None, Field(description="When a person last used it")]
    stops_s: Annotated[int | None, Field(description="Seconds of further inactivity after which it is stopped")]

    @classmethod
    def of(cls, run: Run) -> ConnectOut | None:
        found = connections.connection_to(run)
        if found is None:
            return None
        url = f"{settings.DSTACKWEB_API_URL}{connections.open_path(run)}" if found.opens else None
        return cls(
            ready=found.ready, ssh=found.ssh or None, vscode=found.vscode or None, url=url,
            used_at=found.used_at, stops_s=found.stops_s,
        )  # fmt: skip


class HealthOut(Schema):
    """How a running service is: `starting` until a check has succeeded, then `healthy` or `unhealthy`.

    `unknown` where it is not checked now, as its runner or the gateway is away. `error` is why the last check failed,
    empty if it did not, and `detail` says it in words.
    """

    state: ServiceState
    since: dt.datetime
    checked_at: dt.datetime
    failures: Annotated[int, Field(description="How many of the last checks have failed in a row")]
    error: str
    detail: str


class ServiceOut(Schema):
    """How to call a service, with an API token as `Authorization: Bearer …`, and its health."""

    url: Annotated[str, Field(description="Where it is called; a host name of its own")]
    open_url: Annotated[str, Field(description="The dashboard's address that opens it in a browser")]
    port: Annotated[int, Field(description="Where its commands listen")]
    ready: Annotated[bool, Field(description="Whether its runner is connected to the gateway now")]
    health: HealthOut
    used_at: Annotated[dt.datetime | None, Field(description="When the last request came")]
    stops_s: Annotated[int | None, Field(description="Seconds of further inactivity after which it is stopped")]

    @classmethod
    def of(cls, run: Run) -> ServiceOut | None:
        found = connections.service_of(run)
        if found is None:
            return None
        health = found.health
        return cls(
            url=found.url, open_url=f"{settings.DSTACKWEB_API_URL}{connections.open_path(run)}", port=found.port,
            ready=found.use.ready, used_at=found.use.used_at, stops_s=found.use.stops_s,
            health=HealthOut(
                state=health.state, since=health.since, checked_at=health.checked_at, failures=health.failures,
                error=health.error, detail=gateway.check_failure(health.error, health.error_data),
            ),
        )  # fmt: skip
