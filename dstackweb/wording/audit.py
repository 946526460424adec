"""Entries of the audit log in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.accounts.models import Role, TokenScope
from dstackweb.audit.models import AuditAction, AuditEntry, AuditKind
from dstackweb.wording.hosts import isolation
from dstackweb.wording.notifications import event_name
from dstackweb.wording.queue import LIMITS, reclaim
from dstackweb.wording.sentence import clauses, listing, words

LONGEST = 60
"""Of a value in a sentence; exports have it whole."""


def _labels(codes: type[Role | TokenScope]) -> Callable[[str], str]:
    return lambda code: str(codes(code).label) if code in codes.values else code


def _rule(rule: str) -> str:
    """`run_ended (own)`: an event, and whose runs."""
    event, _blank, whose = rule.partition(" ")
    name = event_name(event)
    return _("%(event)s (own runs)") % {"event": name} if whose == "(own)" else f"{name} {whose}".strip()


def _way(ways: str) -> str:
    return listing(_(way) for way in ways.split(", "))  # of `accounts.sign_in`


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


QUEUE_LABELS: dict[str, Any] = {
    "ageing_minutes": gettext_lazy("ageing, minutes per priority point"),
    "fair_share_minutes": gettext_lazy("maximum fair-share penalty, minutes"),
    **{code.value: name for code, name in LIMITS.items()},
    "borrow_gpus": gettext_lazy("max GPUs to borrow"),
    "lend_gpus": gettext_lazy("max GPUs to lend"),
    "preempt_points": gettext_lazy("minimum difference in priority"),
    "preempt_gpu_hours": gettext_lazy("GPU-hours to displace in 24 hours"),
    "fair_share_half_life_days": gettext_lazy("half-life of past usage, days"),
}
"""Of settings of queues."""

LABELS = {
    "is_active": gettext_lazy("may sign in"),
    "is_default": gettext_lazy("default"),
    "is_staff": gettext_lazy("may open the admin site"),
    "is_superuser": gettext_lazy("deployment admin"),
    "with": gettext_lazy("signed in with"),
    "ciphertext": gettext_lazy("value"),
    "url": gettext_lazy("URL"),
    "rules": gettext_lazy("rules"),
    "key": gettext_lazy("signing key"),
    **QUEUE_LABELS,
}
"""Of fields whose names are not those of a model's field, or say too little."""

VALUES: dict[tuple[str, str], Callable[[str], str]] = {
    (AuditKind.MEMBER, "role"): _labels(Role),
    (AuditKind.INVITE, "role"): _labels(Role),
    (AuditKind.TOKEN, "scope"): _labels(TokenScope),
    (AuditKind.QUEUE, "reclaim"): reclaim,
    (AuditKind.PROJECT, "least_isolation"): isolation,
    (AuditKind.CHANNEL, "rules"): _rule,
    (AuditKind.USER, "with"): _way,
}
"""Fields of codes, with the words of a code."""


class Change(NamedTuple):
    """An entry in words."""

    entry: AuditEntry
    actor: str
    kind: str
    action: str
    changes: list[str]


def described(entries: Iterable[AuditEntry]) -> list[Change]:
    return [Change(one, actor(one), KIND(one.kind), ACTION(one.action), changes(one)) for one in entries]


def actor(entry: AuditEntry) -> str:
    """Who: a user's name, or the server and the command line in words."""
    return entry.actor_name if entry.actor_id else _(entry.actor_name)


def changes(entry: AuditEntry) -> list[str]:
    """Each change: "weight: 1 → 2", "role: member", "password: not shown"."""
    return [
        _change(name, values, VALUES.get((entry.kind, field), str))
        for field, whole in entry.changes.items()
        for name, values in _parts(field, whole)
    ]


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


def _change(name: str, values: list[Any] | None, word: Callable[[str], str] = str, *, is_key: bool = False) -> str:
    label = name if is_key or "." in name else LABELS.get(name) or _(name.replace("_", " "))  # of the models' fields
    if values is None:
        return _("%(field)s: not shown") % {"field": label}
    old, new = values
    if old is None:
        return _("%(field)s: %(new)s") % {"field": label, "new": _value(new, word)}
    return _("%(field)s: %(old)s → %(new)s") % {"field": label, "old": _value(old, word), "new": _value(new, word)}


def _value(value: Any, word: Callable[[str], str] = str) -> str:
    match value:
        case None | "":
            return _("none")
        case True:
            return _("yes")
        case False:
            return _("no")
        case []:
            return _("none")
        case list() if all(isinstance(each, str) for each in value):
            text = clauses(map(word, value))
        case dict() | list():
            text = json.dumps(value, ensure_ascii=False)
        case _:
            text = word(str(value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
