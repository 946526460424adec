"""The form of a channel's rules."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import Project, User
from dstackweb.accounts.preferences import zones
from dstackweb.notifications import mail
from dstackweb.notifications.catalogue import EVENTS, Subject
from dstackweb.notifications.models import GROUPED, Channel, ChannelKind
from dstackweb.notifications.services import RuleScope
from dstackweb.runs.notification_codes import NotificationEvent
from dstackweb.web.accounts.forms import SettingsForm, Styled
from dstackweb.wording import notifications as words

OFF, OWN, ALL, OF_PROJECT = "off", "own", "all", "project:"


def _time(label: Any) -> forms.TimeField:
    widget = forms.TimeInput(attrs={"type": "time"}, format="%H:%M")
    return forms.TimeField(label=label, required=False, widget=widget)


class ChannelForm(Styled):
    """A new channel of a person or a project. Only people have an address for mails."""

    kind = forms.ChoiceField()
    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=60,
        help_text=gettext_lazy("How the channel is called on these pages, for example #gpu-alerts."),
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
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
        self.fields["kind"] = forms.ChoiceField(
            label=gettext_lazy("Send to"),
            choices=[(kind.value, kind.label) for kind in kinds],
            widget=forms.Select(attrs={"class": "form-select"}),
        )


class HoursForm(SettingsForm):
    """When a channel sends."""

    zone = forms.ChoiceField()
    quiet_from = _time(gettext_lazy("Quiet from"))
    quiet_until = _time(gettext_lazy("Quiet until"))
    digest_at = _time(gettext_lazy("All of a day in one message, at"))

    def __init__(self, channel: Channel, zone: str, *args: Any) -> None:
        """`zone`: of the browser, offered until one was chosen."""
        used = channel.quiet_from or channel.digest_at
        times = {name: getattr(channel, name) for name in ("quiet_from", "quiet_until", "digest_at")}
        offered = {channel.zone: channel.zone, **dict(zones()[1:])}
        super().__init__(*args, initial={**times, "zone": channel.zone if used or zone not in offered else zone})
        self.fields["zone"] = forms.ChoiceField(
            label=_("Time zone"), choices=list(offered.items()), widget=forms.Select(attrs={"class": "form-select"})
        )
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
        """What was chosen."""
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
