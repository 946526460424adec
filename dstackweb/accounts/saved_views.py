"""Filters of a project's queues under a name: of one person, or shared with all members."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypedDict

from django.db import IntegrityError, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils.translation import gettext as _

from dstackweb.accounts.models import DefaultView, Project, SavedView, User
from dstackweb.accounts.services import check
from dstackweb.lib.errors import Conflict, NotFound

if TYPE_CHECKING:
    from django_stubs_ext import WithAnnotations

    class _Default(TypedDict):
        is_default: bool

    SeenView: TypeAlias = WithAnnotations[SavedView, _Default]

VIEWS_MOST = 50


def save(project: Project, user: User | None, name: str, query: str) -> SavedView:
    """Save filters under a name, in place of those it had; without `user` for all members.

    Raises Invalid at `name` or `query`, Conflict for too many.
    """
    name = name.strip()
    check(SavedView(project=project, user=user, name=name, query=query), "name", "query")
    views = SavedView.objects.filter(project=project, user=user)
    if not views.filter(name=name).exists() and views.count() >= VIEWS_MOST:
        raise Conflict(
            _("There are %(views_most)s saved views already. Delete one first.") % {"views_most": VIEWS_MOST}
        )
    row, _created = SavedView.objects.update_or_create(project=project, user=user, name=name, defaults={"query": query})
    return row


def delete(project: Project, view_id: int, user: User, shared: bool) -> SavedView:
    """Delete a view of this user, or, if they may (`shared`), one of all. Raises NotFound if there is no such view."""
    row = _changeable(project, view_id, user, shared)
    row.delete()
    return row


def set_default(project: Project, view_id: int, user: User, *, chosen: bool) -> SavedView:
    """Have a person's queue pages begin with a view that they see, or no longer. Raises NotFound."""
    view = one(project, user, view_id)
    if chosen:
        DefaultView.objects.update_or_create(project=project, user=user, defaults={"view": view})
    else:
        DefaultView.objects.filter(user=user, view=view).delete()
    return view


def seen(project: Project, user: User) -> list[SeenView]:
    """The views that this user sees in a project, by name; their queue pages begin with the one that `is_default`."""
    return list(_seen(project, user).order_by("name", "pk"))


def find(project: Project, user: User, name: str) -> SeenView:
    """The view of this name that a user sees; their own before a shared one. Raises NotFound."""
    found = _seen(project, user).filter(name=name)
    view: SeenView | None = found.order_by(F("user").asc(nulls_last=True), "pk").first()
    if view is None:
        raise NotFound(_("There is no view %(name)s.") % {"name": repr(name)})
    return view


def one(project: Project, user: User, view_id: int) -> SeenView:
    """A view that a user sees. Raises NotFound."""
    view: SeenView | None = _seen(project, user).filter(pk=view_id).first()
    if view is None:
        raise NotFound(_("This view does not exist or was already deleted."))
    return view


def _seen(project: Project, user: User) -> QuerySet[SeenView, SeenView]:
    """What a user sees, each with `is_default`."""
    chosen = Exists(DefaultView.objects.filter(user=user, view=OuterRef("pk")))
    return SavedView.objects.filter(Q(user=user) | Q(user=None), project=project).annotate(is_default=chosen)


def change(
    project: Project, view_id: int, user: User, shared: bool, *, name: str | None = None, query: str | None = None
) -> SavedView:
    """Rename a view, or give it other filters: one's own, or, if they may (`shared`), one of all.

    Raises NotFound, Invalid at `name` or `query`, Conflict for a name that another view has.
    """
    view = _changeable(project, view_id, user, shared)
    view.name = view.name if name is None else name.strip()
    view.query = view.query if query is None else query
    check(view, "name", "query")
    try:
        with transaction.atomic():
            view.save(update_fields=["name", "query"])
    except IntegrityError:
        raise Conflict(_("There is a view %(name)s already.") % {"name": view.name}) from None
    return view


def _changeable(project: Project, view_id: int, user: User, shared: bool) -> SavedView:
    """A view of this user, or, if they may (`shared`), one of all. Raises NotFound if there is no such view."""
    mine = Q(user=user) | Q(user=None) if shared else Q(user=user)
    row = SavedView.objects.filter(mine, project=project, pk=view_id).first()
    if row is None:
        raise NotFound(_("This view does not exist or was already deleted."))
    return row
