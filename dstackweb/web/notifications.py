"""Notifications: the reader's, what they are notified of, and the channels that send them; a project's channels."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy
from django.views.decorators.http import require_safe

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import Project, User
from dstackweb.accounts.preferences import zones
from dstackweb.lib.errors import DomainError
from dstackweb.lib.forms import whole_number
from dstackweb.notifications import channels, mail, services
from dstackweb.notifications.messages import path_of
from dstackweb.notifications.models import GROUPED, Channel, ChannelKind, Delivery, DeliveryStatus
from dstackweb.notifications.services import EVENTS, RuleScope, Subject
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.notification_codes import NotificationEvent
from dstackweb.web.accounts.forms import SettingsForm, Styled, attempt, form_status, text_field
from dstackweb.web.accounts.views import page_or_form
from dstackweb.web.common.pages import (
    PageRequest,
    account_action,
    account_page,
    done,
    project_action,
    project_page,
    yes_or_no,
)
from dstackweb.wording import notifications as words
from dstackweb.wording.sentence import Label

OFF, OWN, ALL, OF_PROJECT = "off", "own", "all", "project:"


def _time(label: Any) -> forms.TimeField:
    widget = forms.TimeInput(attrs={"type": "time"}, format="%H:%M")
    return forms.TimeField(label=label, required=False, widget=widget)


class ChannelForm(Styled):
    """A new channel of a person or a project. Only people have an address for mails."""

    kind = forms.ChoiceField(label=gettext_lazy("Send to"))
    name = text_field(
        gettext_lazy("Name"),
        60,
        gettext_lazy("How the channel is called on these pages, for example #gpu-alerts."),
        autocomplete="off",
    )
    url = forms.CharField(
        label=gettext_lazy("URL"),
        max_length=2000,
        required=False,
        help_text=gettext_lazy("Of the incoming webhook, or of your program. Stored encrypted."),
        widget=forms.URLInput(attrs={"autocomplete": "off", "placeholder": "https://", "data-no-draft": True}),
    )

    def __init__(self, owner: User | Project, *args: Any) -> None:
        super().__init__(*args)
        kinds = [ChannelKind.SLACK, ChannelKind.TEAMS, ChannelKind.WEBHOOK]
        if isinstance(owner, User) and owner.email and mail.is_on():
            kinds.insert(0, ChannelKind.EMAIL)
            self.fields["url"].help_text = _("Not needed for e-mail, which goes to %s.") % owner.email
        self.fields["kind"].choices = [(kind.value, kind.label) for kind in kinds]  # type: ignore[attr-defined]


class HoursForm(SettingsForm):
    zone = forms.ChoiceField(label=gettext_lazy("Time zone"))
    quiet_from = _time(gettext_lazy("Quiet from"))
    quiet_until = _time(gettext_lazy("Quiet until"))
    digest_at = _time(gettext_lazy("All of a day in one message, at"))

    def __init__(self, channel: Channel, zone: str, *args: Any) -> None:
        """`zone`: of the browser, offered until one was chosen."""
        used = channel.quiet_from or channel.digest_at
        times = {name: getattr(channel, name) for name in ("quiet_from", "quiet_until", "digest_at")}
        offered = {channel.zone: channel.zone, **dict(zones()[1:])}
        super().__init__(*args, initial={**times, "zone": channel.zone if used or zone not in offered else zone})
        self.fields["zone"].choices = list(offered.items())  # type: ignore[attr-defined]
        if channel.kind not in GROUPED:
            del self.fields["digest_at"]

    def clean(self) -> None:
        super().clean()
        begin, end = self.cleaned_data.get("quiet_from"), self.cleaned_data.get("quiet_until")
        if (begin is None) != (end is None) or (begin is not None and begin == end):
            self.add_error("quiet_until", _("Enter both times, which must differ, or none."))

    def times(self) -> dict[str, dt.time | None]:
        return {name: self.cleaned_data[name] for name in self.fields if name != "zone"}


class RulesForm(SettingsForm):
    """For each event, of which runs it goes to the channel."""

    def __init__(self, channel: Channel, user: User, *args: Any) -> None:
        super().__init__(*args)
        self.channel = channel
        rules = {rule.event: rule for rule in channel.rules.all()}
        of_deployment = channel.project is None and user.is_superuser
        self.events = [one for one, kind in EVENTS.items() if kind.about != Subject.DEPLOYMENT or of_deployment]
        choices_of = {about: _choices(about, channel, user) for about in Subject}
        for event in self.events:
            rule, choices = rules.get(event.value), choices_of[EVENTS[event].about]
            self.fields[event.value] = forms.ChoiceField(
                label=words.event_name(event),
                choices=choices,
                initial=_as_choice(RuleScope(rule.own, rule.project_id)) if rule else OFF,
                widget=forms.Select(attrs={"class": "form-select"}),
                error_messages={"invalid_choice": gettext_lazy("Choose one of these. Nothing was changed.")},
            )

    def rules(self) -> dict[NotificationEvent, RuleScope]:
        chosen = {event: self.cleaned_data[event.value] for event in self.events}
        return {event: _as_scope(value) for event, value in chosen.items() if value != OFF}


def _as_choice(scope: RuleScope) -> str:
    if scope.own:
        return OWN
    return ALL if scope.project_id is None else f"{OF_PROJECT}{scope.project_id}"


def _choices(about: Subject, channel: Channel, user: User) -> list[tuple[str, str]]:
    """Of what a channel may be notified: values and labels."""
    if channel.project is not None:
        return [(OFF, _("off")), (f"{OF_PROJECT}{channel.project.pk}", _("on"))]
    projects = [(f"{OF_PROJECT}{one.pk}", one.name) for one in visible_projects(user).order_by("name")]
    match about:
        case Subject.RUN:
            more = [(OWN, _("my runs")), (ALL, _("all runs of my projects"))]
            more += [(value, _("all runs of %s") % name) for value, name in projects]
        case Subject.PROJECT:
            more = [(ALL, _("my projects")), *projects]
        case Subject.DEPLOYMENT:
            more = [(ALL, _("on"))]
    return [(OFF, _("off")), *more]


def _as_scope(choice: str) -> RuleScope:
    if choice.startswith(OF_PROJECT):
        return RuleScope(own=False, project_id=int(choice.removeprefix(OF_PROJECT)))
    return RuleScope(own=choice == OWN)


PER_PAGE = 50


@account_page
@require_safe
def inbox_page(request: PageRequest) -> HttpResponse:
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


@account_action
def read_all(request: PageRequest) -> HttpResponse:
    services.mark_read(request.user)
    return done(request, _("All notifications are marked as read."), "notifications")


@account_page
@page_or_form
def settings_page(request: PageRequest) -> HttpResponse:
    """What the reader is notified of in the app."""
    bell = services.bell_of(request.user)
    form = RulesForm(bell, request.user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        services.set_rules(bell, form.rules())
        return done(request, _("Saved."), "notification-settings")
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
    return render(request, "notifications/settings.html", values, status=form_status(form, channel_form))


def list_of(found: Iterable[Channel]) -> list[tuple[Channel, str, Delivery | None]]:
    """Each channel with where it sends to, and its last delivery."""
    return [(channel, address_of(channel), channels.deliveries(channel).first()) for channel in found]


def address_of(channel: Channel) -> str:
    """The host of its URL, or the address of its mails; what is wrong with it where it can't be read."""
    if channel.user is not None and not channel.url:
        return channel.user.email
    try:
        return channels.host_of(channel)
    except DomainError as error:  # stored with another secret key; it can still be deleted
        return error.detail


@project_page("manager")
@require_safe
def project_channels(request: PageRequest) -> HttpResponse:
    return _project_page(request, ChannelForm(request.project))


def _project_page(request: PageRequest, form: ChannelForm) -> HttpResponse:
    values = {
        "channels": list_of(channels.of_project(request.project)),
        "form": form,
        "add_url": reverse("project-channel-add", args=[request.project.name]),
    }
    return render(request, "notifications/project.html", values, status=form_status(form))


@project_action("manager")
def add_for_project(request: PageRequest) -> HttpResponse:
    form = ChannelForm(request.project, request.POST)
    channel = attempt(form, lambda: channels.create(request.project, **form.cleaned_data))
    return _added(request, channel) if channel else _project_page(request, form)


@account_action
def add_own(request: PageRequest) -> HttpResponse:
    form = ChannelForm(request.user, request.POST)
    channel = attempt(form, lambda: channels.create(request.user, **form.cleaned_data))
    return _added(request, channel) if channel else settings_with(request, channel_form=form)


def _added(request: PageRequest, channel: Channel) -> HttpResponse:
    messages.success(request, _("Added. Send a test to see that it arrives."))
    return redirect("channel", channel.pk)


@account_page
@page_or_form
def channel_page(request: PageRequest, channel_id: int) -> HttpResponse:
    channel = channels.find(request.user, channel_id)
    form = RulesForm(channel, request.user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        services.set_rules(channel, form.rules())
        return done(request, _("Saved."), "channel", channel.pk)
    return _channel_page(request, channel, form)


@account_action
def channel_hours(request: PageRequest, channel_id: int) -> HttpResponse:
    channel = channels.find(request.user, channel_id)
    form = HoursForm(channel, "", request.POST)
    if form.is_valid():
        channels.set_hours(channel, form.cleaned_data["zone"], form.times())
        return done(request, _("Saved."), "channel", channel.pk)
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
    return render(request, "notifications/channel.html", values, status=form_status(form, hours_form))


def _logged(one: Delivery, now: dt.datetime) -> tuple[Delivery, Label, str, bool]:
    """A delivery, its words and problem, and whether it waits for a time."""
    is_later = one.status == DeliveryStatus.WAITING and one.due_at is not None and one.due_at > now
    return one, words.notification(one.event, one.data), words.problem(one.problem), is_later


def _list_url(channel: Channel) -> str:
    if channel.project is not None:
        return reverse("project-notifications", args=[channel.project.name])
    return reverse("notification-settings")


@account_action
def test_channel(request: PageRequest, channel_id: int) -> HttpResponse:
    channel = channels.find(request.user, channel_id)
    channels.send_test(channel, request.user)
    return done(request, _("The test is sent within seconds."), "channel", channel.pk)


@account_action
def new_channel_key(request: PageRequest, channel_id: int) -> HttpResponse:
    """Make a new key for signatures, and show it once."""
    channel = channels.find(request.user, channel_id)
    if channel.kind != ChannelKind.WEBHOOK:
        return redirect("channel", channel.pk)
    key = channels.replace_key(channel)
    return _channel_page(request, channel, RulesForm(channel, request.user), key)


@account_action
def turn_channel(request: PageRequest, channel_id: int) -> HttpResponse:
    channel = channels.find(request.user, channel_id)
    on = yes_or_no(request, "on")
    channels.turn(channel, on)
    text = _("Turned on.") if on else _("Turned off. Notifications wait until it is on again.")
    return done(request, text, "channel", channel.pk)


@account_action
def delete_channel(request: PageRequest, channel_id: int) -> HttpResponse:
    channel = channels.find(request.user, channel_id)
    url = _list_url(channel)
    channel.delete()
    return done(request, _("Channel deleted."), url)


@account_action
def send_again(request: PageRequest, uid: UUID) -> HttpResponseBase:
    found = channels.send_again(request.user, uid)
    return done(request, _("It is sent again within seconds."), "channel", found.channel_id)
