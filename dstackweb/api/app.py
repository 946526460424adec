"""The REST API: one NinjaAPI, bearer tokens, and errors as `{"detail": …}` with the right status."""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

from django.conf import settings
from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.db import DataError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, UnreadablePostError
from django.utils.translation import gettext as _
from ninja import HeaderEx, NinjaAPI, P, QueryEx, Schema
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.parser import Parser
from ninja.renderers import JSONRenderer
from ninja.security import HttpBearer
from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticSerializationError, to_json

import dstackweb
from dstackweb.accounts import attempts, tokens
from dstackweb.accounts.access import allows, need_role, scope_for
from dstackweb.accounts.models import Project, User
from dstackweb.lib import sql
from dstackweb.lib.errors import DomainError, Forbidden, Invalid, TooMany
from dstackweb.runs import selectors
from dstackweb.runs.models import Run

log = logging.getLogger(__name__)
Item = TypeVar("Item")

MOST_KEYS, MOST_ERRORS = 10_000, 50
"""Of an object in a body, and of an answer: pydantic notes each unknown key, and each wrong value."""
SHORT = 64 * 1024
"""A body that has no room for so many."""


class BodyParser(Parser):
    """Reads the JSON of a body. Raises Invalid for an object with more keys than any client sends."""

    def parse_body(self, request: HttpRequest) -> Any:
        return json.loads(request.body, object_pairs_hook=_few if len(request.body) > SHORT else None)


def _few(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise Invalid(_("an object in the body has more than %(most_keys)s keys") % {"most_keys": f"{MOST_KEYS:,}"})
    return dict(pairs)


class Token(HttpBearer):
    """`Authorization: Bearer <API token>`."""

    def authenticate(self, request: HttpRequest, token: str) -> User | None:
        return sign_in(request, token)


class TokenOf(HttpBearer):
    """Another token, for what is not public: of what `find` knows, as `auth_of` has it."""

    def __init__(self, find: Callable[[str], object]) -> None:
        super().__init__()
        self._find = find

    def authenticate(self, request: HttpRequest, token: str) -> object:
        return self._find(token)


Answers = Callable[[HttpRequest], HttpResponseBase]


def without_cookies(get_response: Answers) -> Answers:
    """Have no session, language or account of a browser count where programs are answered: they send a token."""

    def answer(request: HttpRequest) -> HttpResponseBase:
        if request.path_info.startswith(settings.PROGRAM_PATHS):
            request.COOKIES = {}
        return get_response(request)

    return answer


def version_header(get_response: Answers) -> Answers:
    """Sends the server's version to users of the API: their command line then knows that there is a newer one."""

    def answer(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        if isinstance(auth_of(request), User):
            response["X-Dstackweb-Version"] = dstackweb.__version__
        return response

    return answer


def sign_in(request: HttpRequest, token: str) -> User | None:
    """The user of an API token, let into the project of the address.

    Here, before anything else of the request is looked at: strangers get a 404, whatever they send.
    """
    project = request.resolver_match.kwargs.get("project") if request.resolver_match else None
    found = tokens.sign_in(token, project if project and project.isprintable() else "")  # no database finds others
    if found is None:
        address = request.META.get("REMOTE_ADDR", "")
        attempts.check(address)
        attempts.count_failure(address)
        return None
    if project is not None:
        vars(request)["entered"] = found.enter(project)
    return found.user


class Json(JSONRenderer):
    """Renders answers by pydantic's compiled code, which takes a quarter of the time that Python's does."""

    def render(self, request: HttpRequest, data: Any, *, response_status: int) -> Any:
        try:
            return to_json(data)
        except PydanticSerializationError:  # lazy words, or a request's unpaired surrogates in an error's text
            return super().render(request, data, response_status=response_status)


api = NinjaAPI(
    title="dstackweb",
    version="1.0",
    description=(
        'Runs, queues and hosts of a team that shares GPUs. Errors are `{"detail": …}`, in English or in the language '
        "that the request accepts (`Accept-Language`). Any request may get a 429 (too many requests, see "
        "`Retry-After`), a 413 (too large) or a 503 (the database is not responding)."
    ),
    urls_namespace="api",
    docs_url=None,
    auth=Token(),
    parser=BodyParser(),
    renderer=Json(),
)


@api.exception_handler(DomainError)
def on_domain_error(request: HttpRequest, error: DomainError) -> HttpResponse:
    response = api.create_response(request, {"detail": error.detail, **error.extra}, status=error.status)
    if isinstance(error, TooMany):
        response["Retry-After"] = str(max(1, round(error.retry_after)))
    return response


@api.exception_handler(AuthenticationError)
def on_no_token(request: HttpRequest, error: AuthenticationError) -> HttpResponse:
    detail = _("Send a valid API token as `Authorization: Bearer …`. Make one under Account → API tokens.")
    response = api.create_response(request, {"detail": detail}, status=401)
    response["WWW-Authenticate"] = "Bearer"
    return response


@api.exception_handler(ValidationError)
def on_bad_body(request: HttpRequest, error: ValidationError) -> HttpResponse:
    errors = [
        {"loc": [part for part in item["loc"] if part not in ("body", "data")], "line": None, "msg": item["msg"]}
        for item in error.errors[:MOST_ERRORS]
    ]
    where = ".".join(str(part) for part in errors[0]["loc"]) if errors else ""
    detail = f"{where}: {errors[0]['msg']}" if where else _("the request does not match the schema")
    return api.create_response(request, {"detail": detail, "errors": errors}, status=422)


@api.exception_handler(HttpError)
def on_http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    """An error of the framework, such as a body that is not JSON."""
    detail, status = str(error), error.status_code
    if status == 400:
        cause = error.__cause__
        detail, status = cause.detail if isinstance(cause, Invalid) else _("the body is not valid JSON"), 422
    return api.create_response(request, {"detail": detail}, status=status)


@api.exception_handler(DataError)
@api.exception_handler(UnicodeEncodeError)
def on_unstorable(request: HttpRequest, error: Exception) -> HttpResponse:
    """A value that no row can store: PostgreSQL refuses NUL, and no database takes unpaired surrogates."""
    return api.create_response(request, {"detail": _("the request has a value that can't be stored")}, status=422)


@api.exception_handler(RequestDataTooBig)
def on_too_large(request: HttpRequest, error: RequestDataTooBig) -> HttpResponse:
    detail = _("a request can have at most %(size)s MiB") % {"size": settings.DATA_UPLOAD_MAX_MEMORY_SIZE >> 20}
    return api.create_response(request, {"detail": detail}, status=413)


@api.exception_handler(SuspiciousOperation)
def on_unreadable(request: HttpRequest, error: SuspiciousOperation) -> HttpResponse:
    """More parameters than any client sends."""
    return api.create_response(request, {"detail": _("the request can't be read")}, status=400)


@api.exception_handler(UnreadablePostError)
def on_cut_off(request: HttpRequest, error: UnreadablePostError) -> HttpResponse:
    """The client is gone."""
    return api.create_response(request, {"detail": _("the body ended early")}, status=422)


@api.exception_handler(OperationalError)
@api.exception_handler(InterfaceError)
def on_database_away(request: HttpRequest, error: Exception) -> HttpResponse:
    """The database is not responding, too busy, or was lost during the request; a commit may have succeeded."""
    log.error("the database is not responding: %s", error)
    detail = _("The database is not responding. Your change was made completely or not at all: check, then try again.")
    response = api.create_response(request, {"detail": detail}, status=503)
    response["Retry-After"] = "5"
    return response


@api.exception_handler(Exception)
def on_failure(request: HttpRequest, error: Exception) -> HttpResponse:
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    detail = _("Internal server error; details are in the server's log.")
    return api.create_response(request, {"detail": detail}, status=500)


@api.exception_handler(Http404)
def on_not_found(request: HttpRequest, error: Http404) -> HttpResponse:
    return api.create_response(request, {"detail": _("not found")}, status=404)


class ErrorOut(Schema):
    detail: str
    errors: list[dict[str, Any]] | None = None


class StaleOut(ErrorOut):
    """The run was changed meanwhile, and nothing was applied. Its current values, and its `ETag` without quotes."""

    run: str | None = None
    priority: int | None = None
    queue: str | None = None
    status: str | None = None
    etag: str | None = None


def refusals(*statuses: int) -> dict[int, type[Schema]]:
    """The error responses of an operation, in addition to 401."""
    return dict.fromkeys((401, *statuses), ErrorOut)


REFUSALS = refusals(403, 404, 422)
CONFLICTS = refusals(403, 404, 409, 422)


class Body(Schema):
    model_config = {"extra": "forbid"}


class Page(Schema, Generic[Item]):
    items: list[Item]
    next: str | None


class Listing(Page[Item]):
    """All at once."""

    next: str | None = None


Id = Annotated[str, BeforeValidator(str)]
"""A UUID as text."""
_name = BeforeValidator(lambda found: getattr(found, "name", found))
_username = BeforeValidator(lambda user: user.get_username() if isinstance(user, User) else user)
Name = Annotated[str, _name]
"""The name of a related row."""
NameOrNull = Annotated[str | None, _name]
Username = Annotated[str, _username]
UsernameOrNull = Annotated[str | None, _username]

Moment = Annotated[dt.datetime, AfterValidator(sql.utc)]
"""A time of the query; in UTC where it has no zone."""
Since = QueryEx[Moment | None, P(description="Submitted then or later")]
Until = QueryEx[Moment | None, P(description="Submitted before")]

IfMatch = HeaderEx[str | None, P(alias="If-Match", description="The `ETag` of the run when it was read")]
IdempotencyKey = HeaderEx[
    str, P(alias="Idempotency-Key", max_length=200, description="A repeated key returns the same run")
]
RAW = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
"""The content of a request or response that is bytes, for the schema."""
Format = QueryEx[Literal["csv", "json"], P(alias="format")]
FILE = {
    "responses": {
        200: {
            "content": {"text/csv": {"schema": {"type": "string"}}, "application/json": {"schema": {"type": "array"}}}
        }
    }
}
"""For the schema: an export's content, a header and lines, or one array of objects."""


def ready(request: HttpRequest, answer: dict[str, Any]) -> HttpResponse:
    """Render an answer without validating it against its schema, for lists that are requested often.

    Tests check these answers against the schema.
    """
    return api.create_response(request, answer, status=200)


def project_of(request: HttpRequest, name: str, at_least: str = "viewer") -> tuple[Project, str]:
    """The project of the address and the caller's role in it. Raises Forbidden if the role is too low.

    Strangers don't come here: `sign_in` has refused them.
    """
    project, role = cast(tuple[Project, str], vars(request)["entered"])
    limit = caller(request).token_limit
    if limit is not None and not allows(limit.scope.role, at_least):
        raise Forbidden(
            _("This token has the scope %(scope)s; this needs %(value)s.")
            % {"scope": limit.scope.value, "value": scope_for(at_least).value}
        )
    need_role(role, name, at_least)
    return project, role


def run_of(request: HttpRequest, project: str, name: str, at_least: str = "viewer") -> tuple[Run, str]:
    found, role = project_of(request, project, at_least)
    return selectors.find_run(found, name), role


def admin(request: HttpRequest, what: str) -> User:
    """The caller. Raises Forbidden unless they are a deployment admin."""
    found = caller(request)
    if not found.may_administer:
        raise Forbidden(_("only deployment admins can manage %(what)s") % {"what": what})
    return found


def member_somewhere(request: HttpRequest) -> None:
    """Raises Forbidden unless the caller is a deployment admin or in some project."""
    found = caller(request)
    if not found.may_administer and not found.memberships.exists():
        raise Forbidden(_("you are not a member of any project"))


def caller(request: HttpRequest) -> User:
    user = auth_of(request)
    assert isinstance(user, User)
    return user


def auth_of(request: HttpRequest) -> Any:
    """What the operation's `authenticate` returned; ninja sets it on the request, whose type does not have it."""
    return getattr(request, "auth", None)
