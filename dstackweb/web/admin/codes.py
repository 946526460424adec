"""The words of codes on the admin site: on the pages of rows, in filters and in forms.

What is stored, and what a filter's address has, stays the code; it is shown too where two codes have the same words.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.contrib import admin
from django.contrib.admin.helpers import AdminReadonlyField
from django.db.models import Model
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from dstackweb.audit.models import AuditEntry
from dstackweb.backends.models import Host, HostEvent, Instance
from dstackweb.runs.models import Job, PastPlace, PastVerdict, Queue, QueueEvent, Run, RunEvent, Verdict
from dstackweb.scheduler.models import Retention
from dstackweb.web.admin.cells import LABELS, UNITS, WORDED, Cell, yes_or_no
from dstackweb.wording import audit, hosts, queue, retention, statuses, waiting

CODES: dict[tuple[type[Model], str], Callable[[str], str]] = {
    (Run, "status"): statuses.status,
    (Job, "status"): statuses.status,
    (Run, "termination_reason"): statuses.termination,
    (Job, "termination_reason"): statuses.termination,
    (Verdict, "reason"): waiting.name,
    (PastVerdict, "reason"): waiting.name,
    (PastPlace, "ended_by"): queue.LEFT,
    (Queue, "reclaim"): queue.reclaim,
    (AuditEntry, "kind"): audit.KIND,
    (AuditEntry, "action"): audit.ACTION,
    (Retention, "kind"): retention.kind,
}
"""Fields of codes, and what a code means."""

_TEXTS: dict[tuple[type[Model], str], Cell] = {
    (Run, "status_message"): lambda run: statuses.run_message(run),
    (Job, "message"): lambda job: statuses.message(job.detail, job.message),
    (Host, "isolation"): lambda host: hosts.isolation(host.isolation),
    (Host, "cgroups"): lambda host: hosts.limits(host.cgroups),
    (Host, "engine"): lambda host: hosts.engine(host.engine),
    (QueueEvent, "data"): lambda event: lines(queue.changed(event.data)),
    (AuditEntry, "actor_name"): audit.actor,
    (AuditEntry, "changes"): lambda entry: lines(audit.changes(entry)),
}
AS_LISTED: tuple[tuple[type[Model], str], ...] = (
    (Instance, "status"),
    (Instance, "why"),
    (RunEvent, "kind"),
    (HostEvent, "kind"),
)
TEXTS = _TEXTS | {key: WORDED[key] for key in AS_LISTED}
"""Fields whose words need more of the row than its code."""

SEARCHED_BY_CODE = frozenset({(Run, "termination_reason"), (Job, "termination_reason"), (RunEvent, "kind")})
"""Fields by whose code lists are filtered, since its words are a sentence: pages show both."""


def lines(texts: Iterable[str]) -> SafeString | None:
    return format_html_join("", "<div>{}</div>", ((text,) for text in texts)) or None


class Worded:
    """A form of Django's admin site, or a part of it; fields that cannot be changed show words instead of codes."""

    def __init__(self, part: Any) -> None:
        self._part = part
        if isinstance(part, AdminReadonlyField) and part.field["name"] in LABELS:
            part.field["label"] = capfirst(LABELS[part.field["name"]])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __iter__(self) -> Iterator[Worded]:
        return map(Worded, self._part)

    def contents(self) -> Any:
        return _contents(self._part)


def _contents(field: AdminReadonlyField) -> Any:
    name, row = field.field["field"], field.form.instance
    key = (type(row), name)
    if isinstance(name, str) and isinstance(getattr(row, name, None), bool):
        return yes_or_no(getattr(row, name))
    if name in UNITS and (amount := getattr(row, name, None)) is not None:
        return UNITS[name](amount)
    if not isinstance(name, str) or (key not in TEXTS and key not in CODES):
        return field.contents()
    code = getattr(row, name)
    words = TEXTS[key](row) if key in TEXTS else CODES[key](code) if code else None
    if words and key in SEARCHED_BY_CODE:
        return format_html("{} <code>{}</code>", words, code)
    return words or field.empty_value_display


def labelled(choices: Sequence[tuple[Any, Any]], word: Callable[[str], str]) -> list[tuple[Any, str]]:
    """Choices with the words of their codes; a code stands beside words that another one has as well."""
    texts = [(value, word(str(value))) for value, _label in choices if value]
    often = Counter(text for _value, text in texts)
    return [(value, f"{text} ({value})" if often[text] > 1 else text) for value, text in texts]


def worded(model: type[Model], listed: Any) -> Any:
    """A list's filter, with words for the codes of its field."""
    if inspect.isclass(listed) and issubclass(listed, admin.SimpleListFilter):
        word = CODES.get((model, listed.parameter_name or ""))
        return listed if word is None else _simple(listed, word)
    word = CODES.get((model, listed)) if isinstance(listed, str) else None
    if word is None:
        return listed
    has_choices = bool(getattr(model._meta.get_field(listed), "choices", None))
    return listed, _of_field(admin.ChoicesFieldListFilter if has_choices else admin.AllValuesFieldListFilter, word)


def _simple(listed: type[admin.SimpleListFilter], word: Callable[[str], str]) -> type[admin.SimpleListFilter]:
    class WordedFilter(listed):  # type: ignore[misc, valid-type]  # a class made at run time
        def lookups(self, request: Any, model_admin: Any) -> list[tuple[Any, str]]:
            return labelled(super().lookups(request, model_admin), word)

    return WordedFilter


def _of_field(kind: type[admin.FieldListFilter], word: Callable[[str], str]) -> type[admin.FieldListFilter]:
    class WordedFilter(kind):  # type: ignore[misc, valid-type]  # a class made at run time
        def choices(self, changelist: Any) -> Iterator[Any]:
            everything, *rest = super().choices(changelist)
            yield everything
            for choice in rest:
                yield {**choice, "display": word(str(choice["display"]))}

    return WordedFilter
