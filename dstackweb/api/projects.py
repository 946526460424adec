"""The caller, their projects, limits, and uploads of code."""

from __future__ import annotations

from functools import partial

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from ninja import P, Path, PathEx, Router, Schema, Status

from dstackweb.accounts.access import limited, visible_projects
from dstackweb.accounts.models import Membership, Role
from dstackweb.api.app import RAW, REFUSALS, Listing, caller, project_of, refusals
from dstackweb.lib.errors import NotFound, TooLarge
from dstackweb.runs import archives
from dstackweb.spec.source import MAX_BYTES

router = Router(tags=["deployment"])
Sha256 = PathEx[str, P(pattern="^[0-9a-f]{64}$")]
CHUNK = 1 << 16


class UserOut(Schema):
    username: str
    is_admin: bool


class LimitsOut(Schema):
    archive_bytes: int
    config_bytes: int


class ProjectOut(Schema):
    name: str
    role: str


class ProjectsOut(Listing[ProjectOut]): ...


class ArchiveOut(Schema):
    sha256: str
    size: int


@router.get("/user", response={200: UserOut, **refusals()}, summary="The token's user")
def user(request: HttpRequest) -> UserOut:
    found = caller(request)
    return UserOut(username=found.get_username(), is_admin=found.may_administer)


@router.get("/limits", response={200: LimitsOut, **refusals()}, summary="Size limits")
def limits(request: HttpRequest) -> LimitsOut:
    return LimitsOut(archive_bytes=archives.archive_limit(), config_bytes=MAX_BYTES)


@router.get("/projects", response={200: ProjectsOut, **refusals()}, summary="The caller's projects")
def projects(request: HttpRequest) -> ProjectsOut:
    who = caller(request)
    found = list(visible_projects(who).order_by("name"))
    roles = dict(Membership.objects.filter(user=who).values_list("project", "role"))
    if who.is_superuser:
        roles = {project.pk: Role.ADMIN.value for project in found}
    # A membership may end between the two reads.
    there = [(project, limited(who, project.pk, roles[project.pk])) for project in found if project.pk in roles]
    return ProjectsOut(items=[ProjectOut(name=project.name, role=role) for project, role in there if role])


@router.api_operation(
    ["HEAD"], "/projects/{project}/archives/{sha256}", response={200: None, **REFUSALS}, summary="Is it there already?"
)
def archive_known(request: HttpRequest, project: Path[str], sha256: Sha256) -> HttpResponse:
    """200 when this content was uploaded before, 404 when not."""
    found, _role = project_of(request, project, "member")
    if archives.use_archive(found, sha256) is None:
        raise NotFound(_("not uploaded yet"))
    return HttpResponse(status=200)


@router.put(
    "/projects/{project}/archives/{sha256}",
    response={200: ArchiveOut, 201: ArchiveOut, **REFUSALS, **refusals(413)},
    summary="Upload a working directory",
    openapi_extra={"requestBody": {"required": True, "content": RAW}},
)
def archive_put(request: HttpRequest, project: Path[str], sha256: Sha256) -> Status[ArchiveOut]:
    """The raw bytes of a tar.gz; stored once per content."""
    found, _role = project_of(request, project, "member")
    announced = request.headers.get("Content-Length", "")
    if announced.isdigit() and int(announced) > archives.archive_limit():
        raise TooLarge(
            _("the archive exceeds the limit of %(archive_limit)s MB. Nothing was stored")
            % {"archive_limit": archives.archive_limit() >> 20}
        )
    archive, created = archives.store_archive(found, iter(partial(request.read, CHUNK), b""), sha256)
    return Status(201 if created else 200, ArchiveOut(sha256=archive.sha256, size=archive.size))
