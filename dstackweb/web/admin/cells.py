"""How the admin site shows values: times count on, statuses are chips, numbers have units, codes have words.

What is stored, and what a filter's address has, stays the code; it is shown too where two codes have the same words.
"""

from __future__ import annotations

import datetime as dt
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.contrib import admin
from django.contrib.admin.helpers import AdminReadonlyField
from django.core.exceptions import FieldDoesNotExist
from django.db import models
from django.db.models import Model
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator, capfirst
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.audit.models import AuditEntry
from dstackweb.backends.models import Host, HostEvent, Instance, InstanceStatus
from dstackweb.runs.models import Job, PastPlace, PastVerdict, Queue, QueueEvent, Run, RunEvent, Sweep, Verdict
from dstackweb.scheduler.models import Retention
from dstackweb.web.templatetags.dstackweb_tags import when
from dstackweb.wording import audit, events, hosts, queue, statuses, storage, units, waiting
from dstackweb.wording.sentence import capitalized, clauses

Cell = Callable[[Any], Any]
MOST_TEXT = 140
"""Characters of data in a cell; the row's page has all of it."""

INSTANCE_TONES = {
    InstanceStatus.REQUESTED: "provisioning",
    InstanceStatus.STARTING: "provisioning",
    InstanceStatus.RUNNING: "running",
    InstanceStatus.STOPPING: "terminating",
    InstanceStatus.GONE: "terminated",
}
UNITS: dict[str, Callable[[Any], str]] = {
    "memory_mib": units.mebibytes,
    "memory_used_mib": units.mebibytes,
    "gpu_memory_mib": units.mebibytes,
    "size": units.size,
    "duration_ms": lambda ms: f"{round(ms)} ms",
    "counted_s": units.duration,
    "monthly_budget": units.dollars,
    "price": lambda amount: _("%s/h") % units.dollars(amount),
    "used_gpu_ms": lambda ms: _("%.1f GPU-hours") % (ms / 3_600_000),
    "ageing_minutes": lambda minutes: units.duration(60 * minutes),
    "fair_share_minutes": lambda minutes: units.duration(60 * minutes),
    "exemption_minutes": lambda minutes: units.duration(60 * minutes),
}
"""By the name of a field."""
LABELS: dict[str, Any] = {
    **audit.QUEUE_LABELS,
    **{name: audit.LABELS[name] for name in ("is_active", "is_staff", "is_superuser")},
    "last_login": gettext_lazy("Last sign-in"),
    "is_spot": gettext_lazy("spot"),
    "cgroups": gettext_lazy("Limits of jobs"),
    "cpus": gettext_lazy("CPUs"),
    "cpus_used": gettext_lazy("CPUs used"),
    "memory_mib": gettext_lazy("memory"),
    "memory_used_mib": gettext_lazy("memory used"),
    "duration_ms": gettext_lazy("duration"),
    "counted_s": gettext_lazy("watched for"),
    "used_gpu_ms": gettext_lazy("used"),
    "held_gpus": gettext_lazy("GPUs held"),
    "queued_gpus": gettext_lazy("GPUs queued"),
    "ageing_minutes": gettext_lazy("ageing step"),
    "fair_share_minutes": gettext_lazy("fair share"),
    "exemption_minutes": gettext_lazy("longest exemption"),
    "gpu": gettext_lazy("GPU"),
    "gpus": gettext_lazy("GPUs"),
    "gpu_count": gettext_lazy("GPU count"),
    "run_id": gettext_lazy("run ID"),
    "stranger": gettext_lazy("used outside dstackweb"),
    "uid": gettext_lazy("ID"),
    "uuid": gettext_lazy("UUID"),
}
"""Names of fields with capitals, in the product's words, or of values that have their units."""

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
    (Retention, "kind"): storage.kind,
}
"""Fields of codes, and what a code means."""
WORDED: dict[tuple[type[Model], str], Cell] = {
    (Sweep, "size"): lambda sweep: str(sweep.size),
    (Instance, "status"): lambda one: chip(INSTANCE_TONES[one.status], one.get_status_display()),
    (Instance, "why"): lambda one: statuses.instance_end(one.why) if one.why else None,
    (RunEvent, "kind"): lambda one: events.event_text(one, one.run.spec.get("nodes", 1)).capitalized(),
    (Host, "isolation"): lambda host: hosts.isolation(host.isolation),
    (HostEvent, "kind"): lambda one: capitalized(hosts.event_text(one)),
    (AuditEntry, "actor_name"): audit.actor,
}
"""Fields whose words need more of the row than its code, in lists and on pages."""
LISTED: dict[tuple[type[Model], str], Cell] = {
    (Run, "status"): lambda run: chip(run.status, statuses.status(run.status)),
    (Job, "status"): lambda job: chip(job.status, statuses.status(job.status)),
    (AuditEntry, "changes"): lambda one: _shortened(audit.changes(one)),
    (QueueEvent, "data"): lambda one: _shortened(queue.changed(one.data)),
}
"""In lists alone."""
ON_PAGES: dict[tuple[type[Model], str], Cell] = {
    (Run, "status_message"): statuses.run_message,
    (Job, "message"): lambda job: statuses.message(job.detail, job.message),
    (Host, "cgroups"): lambda host: hosts.limits(host.cgroups),
    (Host, "engine"): lambda host: hosts.engine(host.engine),
    (AuditEntry, "changes"): lambda entry: _lines(audit.changes(entry)),
    (QueueEvent, "data"): lambda event: _lines(queue.changed(event.data)),
}
SEARCHED_BY_CODE = frozenset({(Run, "termination_reason"), (Job, "termination_reason"), (RunEvent, "kind")})
"""Fields by whose code lists are filtered, since its words are a sentence: pages show both."""


def _words_of(model: type[Model], name: str, here: Mapping[tuple[type[Model], str], Cell]) -> Cell | None:
    """What words a field in lists (LISTED) or ON_PAGES; None for one that needs no words."""
    if show := here.get((model, name)) or WORDED.get((model, name)):
        return show
    word = CODES.get((model, name))
    return word and (lambda row: word(code) if (code := getattr(row, name)) else "")


def _shortened(sentences: Sequence[str]) -> str | None:
    return Truncator(clauses(sentences)).chars(MOST_TEXT) or None


def _lines(texts: Iterable[str]) -> SafeString:
    return format_html_join("", "<div>{}</div>", ((text,) for text in texts))


def chip(tone: str, word: object) -> SafeString:
    return format_html('<span class="st st-{}">{}</span>', tone, word)


def yes_or_no(value: bool | None) -> SafeString | None:
    """A tick that stands out, and a quiet no."""
    if value is None:
        return None
    mark, word = ("✓", _("yes")) if value else ("–", _("no"))
    return format_html(
        '<span class="dw-{}" aria-hidden="true">{}</span><span class="visually-hidden">{}</span>',
        "yes" if value else "no", mark, word,
    )  # fmt: skip


def moment(at: dt.datetime | None) -> Any:
    """How long ago, or in how long; the exact time is its title."""
    if at is None:
        return None
    return when(at, "in" if at > timezone.now() else "ago")


def data(value: Any) -> Any:
    """JSON as one line."""
    if not value:
        return None
    if isinstance(value, dict):
        text = ", ".join(f"{key}: {_plain(one)}" for key, one in value.items())
    else:
        text = _plain(value)
    return format_html('<span class="mono">{}</span>', Truncator(text).chars(MOST_TEXT))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def cell(model: type[Model], name: str, options: Any, is_first: bool) -> Any:
    """What shows the field or method `name` of a list; the name itself where Django's way is right."""
    try:
        field = model._meta.get_field(name)
    except FieldDoesNotExist:
        method: Any = getattr(options, name, None)
        if not getattr(method, "boolean", False):
            return name
        label = getattr(method, "short_description", name.replace("_", " "))
        return _column(lambda row: yes_or_no(method(row)), name, label, method)
    show = _words_of(model, name, LISTED) or _by_type(field, name, is_first)
    if show is None and name not in LABELS:
        return name
    label = LABELS.get(name) or getattr(field, "verbose_name", name)
    return _column(show or (lambda row: getattr(row, name)), name, label, None)


def _by_type(field: Any, name: str, is_first: bool) -> Cell | None:
    if name in UNITS:
        unit = UNITS[name]
        return lambda row: None if (value := getattr(row, name)) is None else unit(value)
    match field:
        case models.DateTimeField():
            return lambda row: moment(getattr(row, name))
        case models.BooleanField():
            return lambda row: yes_or_no(getattr(row, name))
        case models.JSONField():
            return lambda row: data(getattr(row, name))
        case models.ForeignKey() if not is_first:
            return lambda row: related(getattr(row, name))
    return None


def related(row: Model | None) -> Any:
    """A row with a link to its page on the admin site."""
    if row is None:
        return None
    if not admin.site.is_registered(type(row)):
        return str(row)
    meta = row._meta
    url = reverse(f"admin:{meta.app_label}_{meta.model_name}_change", args=[row.pk])
    return format_html('<a href="{}">{}</a>', url, row)


def _column(show: Cell, name: str, label: Any, method: Any) -> Any:
    """A column for Django's lists: it is sorted and named as what it shows."""
    order = name if method is None else getattr(method, "admin_order_field", None)
    column = admin.display(description=label, ordering=order)(lambda row: show(row))
    column.__name__ = name
    return column


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
    if not isinstance(name, str):
        return field.contents()
    if show := _words_of(type(row), name, ON_PAGES):
        words = show(row)
        if words and (type(row), name) in SEARCHED_BY_CODE:
            return format_html("{} <code>{}</code>", words, getattr(row, name))
        return words or field.empty_value_display
    value = getattr(row, name, None)
    if isinstance(value, bool):
        return yes_or_no(value)
    return UNITS[name](value) if name in UNITS and value is not None else field.contents()


def labelled(choices: Sequence[tuple[Any, Any]], word: Callable[[str], str]) -> list[tuple[Any, str]]:
    """Choices with the words of their codes; a code stands beside words that another one has as well."""
    texts = [(value, word(str(value))) for value, _label in choices if value]
    often = Counter(text for _value, text in texts)
    return [(value, f"{text} ({value})" if often[text] > 1 else text) for value, text in texts]


def worded(model: type[Model], listed: Any) -> Any:
    """A list's filter, with words for the codes of its field."""
    is_class = inspect.isclass(listed) and issubclass(listed, admin.SimpleListFilter)
    name = listed.parameter_name if is_class else listed
    word = CODES.get((model, name)) if isinstance(name, str) else None
    if word is None:
        return listed
    if is_class:
        return _in_words(listed, word)
    has_choices = bool(getattr(model._meta.get_field(name), "choices", None))
    return name, _in_words(admin.ChoicesFieldListFilter if has_choices else admin.AllValuesFieldListFilter, word)


def _in_words(kind: type[Any], word: Callable[[str], str]) -> type[Any]:
    class WordedFilter(kind):  # type: ignore[misc]  # a class made at run time
        def choices(self, changelist: Any) -> Iterator[Any]:
            everything, *rest = super().choices(changelist)
            yield everything
            texts = dict(labelled([(choice["display"], "") for choice in rest], word))
            yield from ({**choice, "display": texts.get(choice["display"], "")} for choice in rest)

    return WordedFilter
