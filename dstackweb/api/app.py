"""The REST API: one NinjaAPI, bearer tokens, and errors as `{"detail": …}` with the right status."""

from __future__ import annotations

import logging
from typing import Any

from django.db import DataError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import HeaderEx, NinjaAPI, P
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.security import HttpBearer

from dstackweb.accounts.access import project_for
from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import authenticate_token
from dstackweb.lib.errors import DomainError, TooMany

log = logging.getLogger(__name__)


class Token(HttpBearer):
    """`Authorization: Bearer <API token>`."""

    def authenticate(self, request: HttpRequest, token: str) -> User | None:
        return authenticate_token(token)


api = NinjaAPI(
    title="dstackweb",
    version="1.0",
    description=(
        'Runs, queues and hosts of a team that shares GPUs. Errors are `{"detail": …}`. Any request may be answered '
        "with 429 (too many, see `Retry-After`) or 503 (the database does not answer)."
    ),
    urls_namespace="api",
    docs_url=None,
    auth=Token(),
)


@api.exception_handler(DomainError)
def on_domain_error(request: HttpRequest, error: DomainError) -> HttpResponse:
    """Whatever a service refuses, in its own words."""
    response = api.create_response(request, {"detail": error.detail, **error.extra}, status=error.status)
    if isinstance(error, TooMany):
        response["Retry-After"] = str(max(1, round(error.retry_after)))
    return response


@api.exception_handler(AuthenticationError)
def on_no_token(request: HttpRequest, error: AuthenticationError) -> HttpResponse:
    """No token, or one that isn't valid any more."""
    detail = "Send a valid API token as `Authorization: Bearer …`; make one under Account → API tokens."
    response = api.create_response(request, {"detail": detail}, status=401)
    response["WWW-Authenticate"] = "Bearer"
    return response


@api.exception_handler(ValidationError)
def on_bad_body(request: HttpRequest, error: ValidationError) -> HttpResponse:
    """A body or query that doesn't have the documented form."""
    errors = [
        {"loc": [part for part in item["loc"] if part not in ("body", "data")], "line": None, "msg": item["msg"]}
        for item in error.errors
    ]
    where = ".".join(str(part) for part in errors[0]["loc"]) if errors else ""
    detail = f"{where}: {errors[0]['msg']}" if where else "the request does not have the documented form"
    return api.create_response(request, {"detail": detail, "errors": errors}, status=422)


@api.exception_handler(HttpError)
def on_http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    """What the framework itself refuses: a body that isn't JSON."""
    told = "the body is no JSON" if error.status_code == 400 else str(error)
    return api.create_response(request, {"detail": told}, status=422 if error.status_code == 400 else error.status_code)


@api.exception_handler(DataError)
@api.exception_handler(UnicodeEncodeError)
def on_unstorable(request: HttpRequest, error: Exception) -> HttpResponse:
    """What can't be in any row: PostgreSQL refuses a NUL in a name, and no database takes half a character."""
    return api.create_response(request, {"detail": "the request has a value that can't be stored"}, status=422)


@api.exception_handler(OperationalError)
@api.exception_handler(InterfaceError)
def on_database_away(request: HttpRequest, error: Exception) -> HttpResponse:
    """The database is gone, too busy, or cut off in the middle: over soon, but a commit may have got through."""
    log.error("the database does not answer: %s", error)
    detail = (
        "The database does not answer. Try again in a moment, and look first whether your change was made: it was "
        "made as a whole or not at all."
    )
    response = api.create_response(request, {"detail": detail}, status=503)
    response["Retry-After"] = "5"
    return response


@api.exception_handler(Exception)
def on_failure(request: HttpRequest, error: Exception) -> HttpResponse:
    """A fault of the server's own: written down, and told in the API's form."""
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    detail = "This request met a fault of the server's, which is in its log."
    return api.create_response(request, {"detail": detail}, status=500)


@api.exception_handler(Http404)
def on_not_found(request: HttpRequest, error: Http404) -> HttpResponse:
    """No such thing."""
    return api.create_response(request, {"detail": "not found"}, status=404)


IfMatch = HeaderEx[str | None, P(alias="If-Match", description="The `ETag` of the run as it was seen")]
IdempotencyKey = HeaderEx[
    str, P(alias="Idempotency-Key", max_length=200, description="Sent again, it answers with the same run")
]


def ready(request: HttpRequest, answer: dict[str, Any]) -> HttpResponse:
    """Render an answer that was made of stored values as it is: it isn't checked once more on its way out.

    For lists that programs ask for often. Tests hold their answers to the documented form.
    """
    return api.create_response(request, answer, status=200)


def project_of(request: HttpRequest, name: str, at_least: str = "viewer") -> tuple[Project, str]:
    """The project and the caller's role in it; NotFound for a stranger, Forbidden for too low a role."""
    return project_for(caller(request), name, at_least)


def caller(request: HttpRequest) -> User:
    """The user whose token came with the request."""
    user: Any = getattr(request, "auth", None)
    assert isinstance(user, User)
    return user
