"""The form of a channel's rules."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import User
from dstackweb.notifications.models import Channel
from dstackweb.notifications.services import Scope
from dstackweb.runs.codes import NotificationEvent
from dstackweb.web.accounts.forms import SettingsForm
from dstackweb.wording import notifications as words

OFF, OWN, ALL, OF_PROJECT = "off", "own", "all", "project:"


class RulesForm(SettingsForm):
    """For each event, of which runs it goes to the channel."""

    def __init__(self, channel: Channel, user: User, *args: Any) -> None:
        super().__init__(*args)
        self.channel = channel
        rules = {rule.event: rule for rule in channel.rules.all()}
        projects = [(f"{OF_PROJECT}{project.pk}", project.name) for project in visible_projects(user).order_by("name")]
        choices = [(OFF, _("off")), (OWN, _("my runs")), (ALL, _("all runs of my projects"))]
        choices += [(value, _("all runs of %s") % name) for value, name in projects]
        for event in NotificationEvent:
            rule = rules.get(event.value)
            self.fields[event.value] = forms.ChoiceField(
                label=words.event_name(event),
                choices=choices,
                initial=_as_choice(Scope(rule.own, rule.project_id)) if rule else OFF,
                widget=forms.Select(attrs={"class": "form-select"}),
                error_messages={"invalid_choice": gettext_lazy("Choose one of these. Nothing was changed.")},
            )

    def rules(self) -> dict[NotificationEvent, Scope]:
        """What was chosen."""
        chosen = {event: self.cleaned_data[event.value] for event in NotificationEvent}
        return {event: _as_scope(value) for event, value in chosen.items() if value != OFF}


def _as_choice(scope: Scope) -> str:
    if scope.own:
        return OWN
    return ALL if scope.project_id is None else f"{OF_PROJECT}{scope.project_id}"


def _as_scope(choice: str) -> Scope:
    if choice.startswith(OF_PROJECT):
        return Scope(own=False, project_id=int(choice.removeprefix(OF_PROJECT)))
    return Scope(own=choice == OWN)
