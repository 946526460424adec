"""The API of the agents of cloud instances (docs/runner.md). Not public; a token opens one instance."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from ninja import Field, Router, Schema
from ninja.security import HttpBearer
from pydantic import BeforeValidator

from dstackweb.api import tasks
from dstackweb.api.app import auth_of
from dstackweb.api.runner_schemas import InterruptionIn, storable
from dstackweb.lib.errors import Forbidden
from dstackweb.runner.pyz import pyz
from dstackweb.scheduler.cloud import agents

router = Router()


class AgentToken(HttpBearer):
    """The token that an agent gets when it joins."""

    def authenticate(self, request: HttpRequest, token: str) -> UUID | None:
        return agents.instance_of_token(token)


class AgentJoinIn(Schema):
    token: str = Field(min_length=1, max_length=200)
    nonce: str = Field(min_length=1, max_length=64, pattern=r"^[!-~]+$")
    gpus: list[Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[\w-]+$")]] = Field([], max_length=256)
    address: str = Field("", max_length=255, pattern=r"^[0-9A-Za-z.:-]*$")


class EngineIn(Schema):
    """As `runner.engine.EngineSetup.report`."""

    job: UUID
    fault: str = Field("", max_length=40, pattern="^[a-z_]*$")
    text: Annotated[str, BeforeValidator(storable)] = ""


class NextIn(Schema):
    job: UUID | None = None
    left: bool = False
    interruption: InterruptionIn | None = None
    error: Annotated[str, BeforeValidator(storable)] = ""
    engine: EngineIn | None = None


@router.get("/pyz", auth=None, include_in_schema=False)
def runner(request: HttpRequest) -> HttpResponse:
    """The runner and the agent as one file without secrets. Its `ETag` is its SHA-256."""
    return tasks.zip_response(request, *pyz())


@router.post("/instances/{instance_id}/join", auth=None, include_in_schema=False)
def join(request: HttpRequest, instance_id: UUID, body: AgentJoinIn) -> dict[str, Any]:
    """An agent's first call: exchanges the single-use token in its user data for its own, and its first step."""
    token = agents.join(instance_id, body.token, body.nonce, gpus=body.gpus, address=body.address)
    return {"token": token, "next": agents.next_step(instance_id, agents.AgentReport())}


@router.post("/instances/{instance_id}/next", auth=AgentToken(), include_in_schema=False)
def next_(request: HttpRequest, instance_id: UUID, body: NextIn) -> dict[str, Any]:
    """An agent's heartbeat, answered with its next step."""
    if auth_of(request) != instance_id:
        raise Forbidden("this token is for another instance")
    at = body.interruption.at if body.interruption else None
    engine = agents.EngineReport(**body.engine.dict()) if body.engine else None
    return agents.next_step(instance_id, agents.AgentReport(body.job, body.left, at, body.error, engine))
