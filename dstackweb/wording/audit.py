"""Entries of the audit log in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
        AuditKind.SSH_KEY: gettext_lazy("SSH key"),
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
    return [_change(name, values) for field, whole in entry.changes.items() for name, values in _parts(field, whole)]


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Each key that differs, with both values: "max_duration: 8h → 12h"."""
    return [_change(name, values, is_key=True) for name, values in _parts("", [before, after])]


def _parts(field: str, values: Any) -> Iterator[tuple[str, Any]]:
    """A field's change; of one with keys of its own, that of each key."""
    old, new = values or (None, None)
    if not isinstance(new, dict) or not isinstance(old or {}, dict):
        yield field, values
        return
    before = old or {}
    for key in dict.fromkeys((*before, *new)):
        if before.get(key) != new.get(key):
            name = f"{field}.{key}" if field else f"{key}"
            part = [before.get(key), new.get(key)]
            yield from _parts(name, part) if isinstance(part[0] or part[1], dict) else ((name, part),)


def _change(name: str, values: list[Any] | None, *, is_key: bool = False) -> str:
    label = name if is_key or "." in name else _(name.replace("_", " "))  # of the models and their fields
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
