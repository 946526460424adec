"""Writes the audit log, in the transaction of each change: from signals of the models in WATCHED.

Only `QuerySet.update` sends no signal: settings must not be changed with it (a test looks for that).
"""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from django.contrib.auth import signals as sessions
from django.db.models import Model
from django.db.models.signals import post_delete, post_save, pre_save
from django.http import HttpRequest, HttpResponseBase
from django.utils.translation import gettext_noop

from dstackweb.accounts import sign_in
from dstackweb.accounts.models import (
    ApiToken,
    Invite,
    LoginLink,
    Membership,
    Project,
    ProjectSecret,
    SavedView,
    SSHKey,
    User,
)
from dstackweb.audit.models import AuditAction, AuditEntry, AuditKind
from dstackweb.backends.models import Backend, Host, HostEvent, HostInvite
from dstackweb.gpus.models import ProjectPolicies
from dstackweb.lib.models import Bucket, Busy
from dstackweb.profiles.models import Profile
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.removal import run_deleted

FAILURES_PER_S, FAILURES_AT_ONCE = 1.0, 60.0
"""More failed sign-ins are not recorded, so that they can't fill the database."""
SERVER = frozenset({"up", "qcluster", "ticker", "gateway"})


@dataclass(frozen=True)
class Watched:
    """Fields whose changes are recorded, and those of which only that they changed; of rows for which `which` holds."""

    kind: AuditKind
    fields: tuple[str, ...]
    secret: tuple[str, ...] = ()
    which: Callable[[Any], bool] = lambda _row: True


WATCHED: dict[type[Model], Watched] = {
    User: Watched(
        AuditKind.USER, ("username", "email", "is_active", "is_staff", "is_superuser"), secret=("password",)
    ),
    Project: Watched(
        AuditKind.PROJECT,
        ("name", "weight", "monthly_budget", "member_max_priority", "least_isolation", "deleting_since"),
    ),
    Membership: Watched(AuditKind.MEMBER, ("user", "role", "by_group")),
    Authenticator: Watched(AuditKind.SECOND_STEP, ("type",), secret=("data",)),
    SocialAccount: Watched(AuditKind.SIGN_ON, ("uid",)),
    Invite: Watched(AuditKind.INVITE, ("role", "expires_at")),
    ApiToken: Watched(AuditKind.TOKEN, ("user", "name", "scope", "project", "expires_at", "revoked_at")),
    SSHKey: Watched(AuditKind.SSH_KEY, ("user", "name", "fingerprint")),
    LoginLink: Watched(AuditKind.SIGN_IN_LINK, ("user", "expires_at")),
    ProjectSecret: Watched(AuditKind.SECRET, ("name",), secret=("ciphertext",)),
    Queue: Watched(
        AuditKind.QUEUE,
        (
            "name", "ageing_minutes", "fair_share_minutes", "fair_share_half_life_days", "paused", "draining",
            "max_running", "max_gpus", "max_running_per_user", "max_gpus_per_user", "preempt_points",
            "preempt_gpu_hours", "cohort", "borrow_gpus", "lend_gpus", "reclaim",
        ),
    ),
    Profile: Watched(AuditKind.PROFILE, ("name", "is_default", "settings", "description")),
    ProjectPolicies: Watched(AuditKind.POLICIES, ("observe_only", "max_exemptions", "exemption_minutes")),
    Backend: Watched(AuditKind.BACKEND, ("name", "kind", "config", "enabled", "deleted_at"), secret=("secret",)),
    Host: Watched(AuditKind.HOST, ("labels", "setup")),
    HostInvite: Watched(AuditKind.HOST_INVITE, ("expires_at",)),
    SavedView: Watched(AuditKind.VIEW, ("name", "query"), which=lambda view: view.user_id is None),  # shared
}  # fmt: skip

_request: ContextVar[HttpRequest | None] = ContextVar("audited_request", default=None)
"""The request that this thread answers."""


def middleware(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[[HttpRequest], HttpResponseBase]:
    """Has changes know the request that made them, and so its user and address."""

    def answer(request: HttpRequest) -> HttpResponseBase:
        with answering(request):
            return get_response(request)

    return answer


@contextmanager
def answering(request: HttpRequest) -> Iterator[None]:
    """Changes made in this block are of this request."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def record(
    kind: AuditKind, action: AuditAction, name: str, *, project: Project | None = None, actor: User | None = None,
    changes: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Add an entry of the request that is answered; outside requests the actor is the command line or the server."""
    request = _request.get()
    user = actor or (_user_of(request) if request is not None else None)
    AuditEntry.objects.create(
        actor_id=user.pk if user is not None else None,
        actor_name=user.get_username() if user is not None else _nameless(request),
        via=user.token_name if user is not None else "",
        address=request.META.get("REMOTE_ADDR") or None if request is not None else None,
        kind=kind,
        action=action,
        name=name[:200],
        project_id=project.pk if project is not None else None,
        project_name=project.name if project is not None else "",
        changes=dict(changes or {}),
    )


def watch(model: type[Model], watched: Watched) -> None:
    """Record changes of a model, also of a room above this one."""
    WATCHED[model] = watched
    name = f"audit.{model.__name__}"
    pre_save.connect(_before_save, sender=model, dispatch_uid=name)
    post_save.connect(_after_save, sender=model, dispatch_uid=name)
    post_delete.connect(_after_delete, sender=model, dispatch_uid=name)


def connect() -> None:
    for model, watched in WATCHED.items():
        watch(model, watched)
    post_save.connect(_after_host_event, sender=HostEvent, dispatch_uid="audit.HostEvent")
    run_deleted.connect(_run_deleted, dispatch_uid="audit.run_deleted")
    sessions.user_logged_in.connect(_signed_in, dispatch_uid="audit.signed_in")
    sessions.user_logged_out.connect(_signed_out, dispatch_uid="audit.signed_out")
    sessions.user_login_failed.connect(_sign_in_failed, dispatch_uid="audit.sign_in_failed")


def _before_save(sender: type[Model], instance: Model, update_fields: Any, raw: bool = False, **_signal: Any) -> None:
    """Read what the row was, if a recorded field is written."""
    watched = WATCHED[sender]
    written = update_fields is None or {*watched.fields, *watched.secret} & set(update_fields)
    before = None
    if written and not raw and instance.pk is not None:
        before = sender._base_manager.filter(pk=instance.pk).first()
    instance.__dict__["_audited"] = bool(written) and not raw
    instance.__dict__["_before"] = before


def _after_save(sender: type[Model], instance: Model, **_signal: Any) -> None:
    before: Model | None = instance.__dict__.pop("_before", None)
    if not instance.__dict__.pop("_audited", False):
        return
    changes = _changes(WATCHED[sender], before, instance)
    if changes or before is None:
        _record_row(instance, AuditAction.CREATED if before is None else AuditAction.CHANGED, changes)


def _after_delete(sender: type[Model], instance: Model, **_signal: Any) -> None:
    _record_row(instance, AuditAction.DELETED, {})


def _record_row(row: Model, action: AuditAction, changes: Mapping[str, Any]) -> None:
    watched = WATCHED[type(row)]
    if watched.which(row):
        project = row if isinstance(row, Project) else getattr(row, "project", None)
        record(watched.kind, action, name_of(row), project=project, changes=changes)


def _changes(watched: Watched, before: Model | None, after: Model) -> dict[str, Any]:
    """Of a new row, what is set, and not its name once more."""
    found: dict[str, Any] = {}
    for name in watched.fields:
        new = _plain(getattr(after, name))
        old = _plain(getattr(before, name)) if before is not None else None
        usual: tuple[Any, ...] = (old,) if before is not None else (None, "", False, {}, [], name_of(after))
        if new not in usual:
            found[name] = [old, new]
    for name in watched.secret:
        if getattr(before, name, "") != getattr(after, name):
            found[name] = None
    return found


def _after_host_event(sender: type[HostEvent], instance: HostEvent, created: bool, **_signal: Any) -> None:
    """What people do to a host is an event of the host: it is drained, removed, declared gone."""
    if created and instance.actor is not None:
        changes = {"event": [None, instance.kind], **{key: [None, _plain(at)] for key, at in instance.data.items()}}
        record(AuditKind.HOST, AuditAction.CHANGED, instance.host.name, actor=instance.actor, changes=changes)


def _run_deleted(sender: type[Run], run: Run, user: User, **_signal: Any) -> None:
    """Its events, which say what else people did to it, are deleted with it."""
    whose = {"user": [None, run.user.get_username()], "id": [None, str(run.uid)]}
    record(AuditKind.RUN, AuditAction.DELETED, run.name, project=run.project, actor=user, changes=whose)


def _signed_in(sender: Any, request: HttpRequest, user: User, **_signal: Any) -> None:
    how = ", ".join(sign_in.ways(request, user))
    record(AuditKind.USER, AuditAction.SIGNED_IN, user.get_username(), actor=user, changes={"with": [None, how]})


def _signed_out(sender: Any, request: HttpRequest, user: User | None, **_signal: Any) -> None:
    if user is not None:
        record(AuditKind.USER, AuditAction.SIGNED_OUT, user.get_username(), actor=user)


def _sign_in_failed(sender: Any, credentials: Mapping[str, Any], **_signal: Any) -> None:
    try:
        Bucket.reserve("audit:failures", FAILURES_PER_S, FAILURES_AT_ONCE, 0.0, round(time.time() * 1e6))
    except Busy:
        return
    record(AuditKind.USER, AuditAction.SIGN_IN_FAILED, str(credentials.get("username", "")))


def _user_of(request: HttpRequest) -> User | None:
    """Of the API token or of the session."""
    for found in (getattr(request, "auth", None), getattr(request, "user", None)):
        if isinstance(found, User):
            return found
    return None


def _nameless(request: HttpRequest | None) -> str:
    if request is not None:
        return gettext_noop("no one signed in")
    if sys.argv[1:2] and sys.argv[1] not in SERVER and sys.argv[0].endswith(("manage.py", "dstackweb-server")):
        return f"{getpass.getuser()} on the server's command line"
    return gettext_noop("the server")


def name_of(row: Model) -> str:
    """What entries call a row."""
    match row:
        case Membership() | Authenticator() | SocialAccount():
            return row.user.get_username()
        case Queue() | Profile() | ProjectSecret() | Host() | Backend() | SavedView():
            return row.name
        case ProjectPolicies():
            return row.project.name
    return str(row)


def _plain(value: Any) -> Any:
    """As JSON holds it."""
    if value is None or isinstance(value, bool | int | str | dict | list):
        return value
    return str(value)
