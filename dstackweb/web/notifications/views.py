"""A user's notifications, and what they are notified of."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from dstackweb.lib.forms import whole_number
from dstackweb.notifications import channels, services
from dstackweb.notifications.messages import path_of
from dstackweb.notifications.models import Delivery
from dstackweb.runs.models import Queue, Run
from dstackweb.web.common.pages import PageRequest, account_page, done
from dstackweb.web.notifications.channel_list import list_of
from dstackweb.web.notifications.forms import ChannelForm, RulesForm
from dstackweb.wording import notifications as words

PER_PAGE = 50


@account_page
@require_safe
def inbox_page(request: PageRequest) -> HttpResponse:
    """The reader's notifications, the newest first."""
    before = whole_number(request.GET.get("before"))
    found = services.inbox(request.user).select_related("project")
    rows = list((found.filter(pk__lt=before) if before else found)[: PER_PAGE + 1])
    values: dict[str, Any] = {
        "rows": [(row, words.notification(row.event, row.data)) for row in rows[:PER_PAGE]],
        "following": rows[PER_PAGE - 1].pk if len(rows) > PER_PAGE else None,
        "before": before,
        "unread": services.unread(request.user),
    }
    return render(request, "notifications/inbox.html", values)


@account_page
@require_safe
def open_one(request: PageRequest, uid: UUID) -> HttpResponse:
    """To what a notification is about; it counts as read."""
    found = services.open_one(request.user, uid)
    if not _is_there(found):
        messages.info(request, _("What this was about is no longer there."))
        return redirect("notifications")
    return redirect(path_of(found))


def _is_there(found: Delivery) -> bool:
    """Whether the run or queue that it is about still exists."""
    if found.run_uid is not None:
        return Run.objects.filter(uid=found.run_uid, project=found.project).exists()
    queue = found.data.get("queue")
    return queue is None or Queue.objects.filter(name=queue, project=found.project).exists()


@account_page
@require_POST
def read_all(request: PageRequest) -> HttpResponse:
    services.mark_read(request.user)
    return done(request, _("All notifications are marked as read."), reverse("notifications"))


@account_page
@require_http_methods(["GET", "HEAD", "POST"])
def settings_page(request: PageRequest) -> HttpResponse:
    """What the reader is notified of in the app."""
    bell = services.bell_of(request.user)
    form = RulesForm(bell, request.user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        services.set_rules(bell, form.rules())
        return done(request, _("Saved."), reverse("notification-settings"))
    return settings_with(request, form=form)


def settings_with(
    request: PageRequest, form: RulesForm | None = None, channel_form: ChannelForm | None = None
) -> HttpResponse:
    """The settings page with these forms, or new ones."""
    form = form or RulesForm(services.bell_of(request.user), request.user)
    channel_form = channel_form or ChannelForm(request.user)
    values = {
        "form": form,
        "channel_form": channel_form,
        "channels": list_of(channels.of_user(request.user)),
        "add_url": reverse("channel-add"),
    }
    faulty = form.errors or channel_form.errors
    return render(request, "notifications/settings.html", values, status=422 if faulty else 200)
