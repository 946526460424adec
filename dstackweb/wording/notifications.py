"""Notifications in words: what each event is called, and a sentence for each that has happened."""

from __future__ import annotations

from typing import Any, assert_never

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.runs.codes import NotificationEvent, RunEventKind
from dstackweb.wording import policy, statuses
from dstackweb.wording.sentence import Label, Sentence, as_text, fill, known, words
from dstackweb.wording.units import duration

Data = dict[str, Any]

event_name = words(
    {
        NotificationEvent.RUN_STARTED: gettext_lazy("A run starts after waiting 5 minutes or longer"),
        NotificationEvent.RUN_ENDED: gettext_lazy("A run ends, however it ends"),
        NotificationEvent.RUN_FAILED: gettext_lazy("A run fails, or the server stops it"),
        NotificationEvent.RUN_STOPS_SOON: gettext_lazy("A utilization policy is about to stop a run"),
    }
)
"""An event in a list of rules."""


def notification(event: str, data: Data) -> Label:
    """What happened: a title with the name of what it is about, the rest of the sentence, and a tone."""
    kind = known(NotificationEvent, event)
    match kind:
        case NotificationEvent.RUN_STARTED:
            title = _("%(run)s started") % data
            return Label(title, _("It waited %s.") % duration(data["waited_s"]), "go")
        case NotificationEvent.RUN_ENDED | NotificationEvent.RUN_FAILED:
            return _ended(data)
        case NotificationEvent.RUN_STOPS_SOON:
            return _stops_soon(data)
        case None:
            return Label(as_text(event), "", "info")
        case never:
            assert_never(never)


def _ended(data: Data) -> Label:
    title = _("%(run)s: %(status)s") % {"run": data["run"], "status": statuses.status(data["status"])}
    text = statuses.message(data.get("detail") or {}, data.get("message") or "")
    text = text or (statuses.termination(data["reason"]) if data.get("reason") else "")
    return Label(title, text, {"done": "go", "failed": "bad"}.get(data["status"], "wait"))


def _stops_soon(data: Data) -> Label:
    found, text = data["data"], Sentence("")
    if data["kind"] == RunEventKind.UTILIZATION_NOTICE:
        title, text = _("%(run)s is about to be stopped"), policy.notice(found)
    else:
        title, text = _("%(run)s leaves GPUs unused"), Sentence(policy.was_low(found))
    return Label(title % data, fill("%(text)s.", text=text.capitalized()), "wait")
