"""Channels that send notifications: a person's and a project's, their rules, their log."""

from __future__ import annotations

import datetime as dt
from uuid import UUID

from django.contrib import messages
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from dstackweb.accounts.models import Project, User
from dstackweb.notifications import channels, services
from dstackweb.notifications.models import Channel, ChannelKind, Delivery, DeliveryStatus
from dstackweb.web.accounts.forms import attempt
from dstackweb.web.common.pages import PageRequest, account_page, done, project_page, yes_or_no
from dstackweb.web.notifications.channel_list import address_of, list_of
from dstackweb.web.notifications.forms import ChannelForm, HoursForm, RulesForm
from dstackweb.web.notifications.views import settings_with
from dstackweb.wording import notifications as words
from dstackweb.wording.sentence import Label


@project_page("manager")
@require_safe
def project_channels(request: PageRequest) -> HttpResponse:
    """Where a project's notifications go."""
    return _project_page(request, ChannelForm(request.project))


def _project_page(request: PageRequest, form: ChannelForm) -> HttpResponse:
    values = {
        "channels": list_of(channels.of_project(request.project)),
        "form": form,
        "add_url": reverse("project-channel-add", args=[request.project.name]),
    }
    return render(request, "notifications/project.html", values, status=422 if form.errors else 200)


@project_page("manager")
@require_POST
def add_for_project(request: PageRequest) -> HttpResponse:
    form = ChannelForm(request.project, request.POST)
    channel = attempt(form, lambda: _add(form, request.project))
    return _added(request, channel) if channel else _project_page(request, form)


@account_page
@require_POST
def add_own(request: PageRequest) -> HttpResponse:
    form = ChannelForm(request.user, request.POST)
    channel = attempt(form, lambda: _add(form, request.user))
    return _added(request, channel) if channel else settings_with(request, channel_form=form)


def _add(form: ChannelForm, owner: User | Project) -> Channel:
    kind, name, url = (form.cleaned_data[field] for field in ("kind", "name", "url"))
    return channels.create(owner, ChannelKind(kind), name, url)


def _added(request: PageRequest, channel: Channel) -> HttpResponse:
    messages.success(request, _("Added. Send a test to see that it arrives."))
    return redirect("channel", channel.pk)


@account_page
@require_http_methods(["GET", "HEAD", "POST"])
def channel_page(request: PageRequest, channel_id: int) -> HttpResponse:
    """A channel's rules and its log."""
    channel = channels.find(request.user, channel_id)
    form = RulesForm(channel, request.user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        services.set_rules(channel, form.rules())
        return done(request, _("Saved."), reverse("channel", args=[channel.pk]))
    return _channel_page(request, channel, form)


@account_page
@require_POST
def hours(request: PageRequest, channel_id: int) -> HttpResponse:
    """Set when a channel sends."""
    channel = channels.find(request.user, channel_id)
    form = HoursForm(channel, "", request.POST)
    if form.is_valid():
        channels.set_hours(channel, form.cleaned_data["zone"], form.times())
        return done(request, _("Saved."), reverse("channel", args=[channel.pk]))
    return _channel_page(request, channel, RulesForm(channel, request.user), hours_form=form)


def _channel_page(
    request: PageRequest, channel: Channel, form: RulesForm, key: str = "", hours_form: HoursForm | None = None
) -> HttpResponse:
    found = channels.deliveries(channel)[: channels.LOGGED]
    hours_form, now = hours_form or HoursForm(channel, request.COOKIES.get("zone", "")), timezone.now()
    values = {
        "channel": channel,
        "to": address_of(channel),
        "form": form,
        "hours_form": hours_form,
        "key": key,
        "back": _list_url(channel),
        "signed": channel.kind == ChannelKind.WEBHOOK,
        "log": [_logged(one, now) for one in found],
    }
    faulty = form.errors or hours_form.errors
    return render(request, "notifications/channel.html", values, status=422 if faulty else 200)


def _logged(one: Delivery, now: dt.datetime) -> tuple[Delivery, Label, str, bool]:
    """A delivery, its words and problem, and whether it waits for a time."""
    is_later = one.status == DeliveryStatus.WAITING and one.due_at is not None and one.due_at > now
    return one, words.notification(one.event, one.data), words.problem(one.problem), is_later


def _list_url(channel: Channel) -> str:
    if channel.project is not None:
        return reverse("project-notifications", args=[channel.project.name])
    return reverse("notification-settings")


@account_page
@require_POST
def test(request: PageRequest, channel_id: int) -> HttpResponse:
    channel = channels.find(request.user, channel_id)
    channels.send_test(channel, request.user)
    return done(request, _("The test is sent within seconds."), reverse("channel", args=[channel.pk]))


@account_page
@require_POST
def new_key(request: PageRequest, channel_id: int) -> HttpResponse:
    """Make a new key for signatures, and show it once."""
    channel = channels.find(request.user, channel_id)
    if channel.kind != ChannelKind.WEBHOOK:
        return redirect("channel", channel.pk)
    key = channels.replace_key(channel)
    return _channel_page(request, channel, RulesForm(channel, request.user), key)


@account_page
@require_POST
def turn(request: PageRequest, channel_id: int) -> HttpResponse:
    channel = channels.find(request.user, channel_id)
    on = yes_or_no(request, "on")
    channels.turn(channel, on)
    text = _("Turned on.") if on else _("Turned off. Notifications wait until it is on again.")
    return done(request, text, reverse("channel", args=[channel.pk]))


@account_page
@require_POST
def delete(request: PageRequest, channel_id: int) -> HttpResponse:
    channel = channels.find(request.user, channel_id)
    url = _list_url(channel)
    channel.delete()
    return done(request, _("Channel deleted."), url)


@account_page
@require_POST
def send_again(request: PageRequest, uid: UUID) -> HttpResponseBase:
    found = channels.send_again(request.user, uid)
    return done(request, _("It is sent again within seconds."), reverse("channel", args=[found.channel_id]))
