"""Entries of the audit log in words."""

from __future__ import annotations

import json
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.audit.models import AuditAction, AuditEntry, AuditKind
from dstackweb.wording.sentence import words

LONGEST = 60
"""Of a value in a sentence; exports have it whole."""

KIND = words(
    {
        AuditKind.USER: gettext_lazy("user"),
        AuditKind.PROJECT: gettext_lazy("project"),
        AuditKind.MEMBER: gettext_lazy("member"),
        AuditKind.INVITE: gettext_lazy("invite"),
        AuditKind.TOKEN: gettext_lazy("API token"),
        AuditKind.SIGN_IN_LINK: gettext_lazy("sign-in link"),
        AuditKind.PASSWORD_LINK: gettext_lazy("password link"),
        AuditKind.SECOND_STEP: gettext_lazy("second step"),
        AuditKind.SIGN_ON: gettext_lazy("single sign-on"),
        AuditKind.SECRET: gettext_lazy("secret"),
        AuditKind.QUEUE: gettext_lazy("queue"),
        AuditKind.PROFILE: gettext_lazy("profile"),
        AuditKind.POLICIES: gettext_lazy("utilization policies"),
        AuditKind.BACKEND: gettext_lazy("backend"),
        AuditKind.HOST: gettext_lazy("host"),
        AuditKind.HOST_INVITE: gettext_lazy("host invite"),
        AuditKind.CHANNEL: gettext_lazy("notification channel"),
        AuditKind.RUN: gettext_lazy("run"),
        AuditKind.VIEW: gettext_lazy("shared view"),
    }
)
ACTION = words(
    {
        AuditAction.CREATED: gettext_lazy("created"),
        AuditAction.CHANGED: gettext_lazy("changed"),
        AuditAction.DELETED: gettext_lazy("deleted"),
        AuditAction.SIGNED_IN: gettext_lazy("signed in"),
        AuditAction.SIGNED_OUT: gettext_lazy("signed out"),
        AuditAction.SIGN_IN_FAILED: gettext_lazy("sign-in failed"),
    }
)


def changes(entry: AuditEntry) -> list[str]:
    """Each change: "weight: 1 → 2", "role: member", "password: not shown"."""
    return [_change(entry, name, values) for name, values in entry.changes.items()]


def _change(entry: AuditEntry, name: str, values: list[Any] | None) -> str:
    label = _(name.replace("_", " "))  # of the models and their fields
    if values is None:
        return _("%(field)s: not shown") % {"field": _("value") if name == "ciphertext" else label}
    old, new = values
    if old is None:
        return _("%(field)s: %(new)s") % {"field": label, "new": _value(new)}
    return _("%(field)s: %(old)s → %(new)s") % {"field": label, "old": _value(old), "new": _value(new)}


def _value(value: Any) -> str:
    match value:
        case None | "":
            return _("none")
        case True:
            return _("yes")
        case False:
            return _("no")
        case dict() | list():
            value = json.dumps(value, ensure_ascii=False)
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
