"""Notifications and mails in words: what each event is called, and a sentence for each that has happened."""

from __future__ import annotations

from typing import Any, NamedTuple, assert_never

from django.utils.translation import gettext as _, gettext_lazy, ngettext

from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.notification_codes import DeliveryProblem, NotificationEvent, QueueStuck
from dstackweb.wording import events, hosts, offers, policy, statuses
from dstackweb.wording.sentence import Label, Sentence, as_text, fill, known, words
from dstackweb.wording.units import dollars, duration

Data = dict[str, Any]

event_name = words(
    {
        NotificationEvent.RUN_STARTED: gettext_lazy("A run starts after waiting 5 minutes or longer"),
        NotificationEvent.RUN_ENDED: gettext_lazy("A run ends, however it ends"),
        NotificationEvent.RUN_FAILED: gettext_lazy("A run fails, or the server stops it"),
        NotificationEvent.RUN_STOPS_SOON: gettext_lazy("A utilization policy is about to stop a run"),
        NotificationEvent.RUN_DISPLACED: gettext_lazy("A run is displaced by another one, and queued again"),
        NotificationEvent.RUN_KEPT: gettext_lazy("Someone else keeps a run from its utilization policy"),
        NotificationEvent.TASKS_FAIL: gettext_lazy("More of a run’s tasks fail: 20 points within 5 minutes"),
        NotificationEvent.QUEUE_STUCK: gettext_lazy("Runs wait in a queue and none can start, for 30 minutes"),
        NotificationEvent.BUDGET_SPENT: gettext_lazy("A project has spent 80 % or all of its budget"),
        NotificationEvent.BACKEND_FAILS: gettext_lazy("A backend cannot be read, for 10 minutes"),
        NotificationEvent.API_LIMIT: gettext_lazy("A cloud's API is near its rate limit, or throttles"),
        NotificationEvent.HOST_HELD_BACK: gettext_lazy("A host gets no more jobs because starts fail there"),
        NotificationEvent.TEST: gettext_lazy("Test"),
    }
)
"""An event in a list of rules."""

queue_stuck = words(
    {
        QueueStuck.PAUSED: gettext_lazy("The queue is paused."),
        QueueStuck.IMPOSSIBLE: gettext_lazy("None of them can ever start as things are: see why each waits."),
    }
)
"""Why nothing starts from a queue, as a sentence."""

problem = words(
    {
        DeliveryProblem.PRIVATE_ADDRESS: gettext_lazy(
            "Not sent: a private address, or not encrypted. An admin may allow its network with "
            "DSTACKWEB_WEBHOOK_NETWORKS."
        ),
        DeliveryProblem.UNREACHABLE: gettext_lazy("The receiver could not be reached. Nothing was sent."),
        DeliveryProblem.NO_ANSWER: gettext_lazy("The receiver did not answer in time. It may have arrived."),
        DeliveryProblem.INTERRUPTED: gettext_lazy("The server was interrupted while sending. It may have arrived."),
        DeliveryProblem.ANSWER: gettext_lazy("The receiver refused it."),
        DeliveryProblem.GONE: gettext_lazy("The receiver is gone for good, so the channel was turned off."),
        DeliveryProblem.NO_ACCESS: gettext_lazy("Not sent: the account can no longer see the project."),
        DeliveryProblem.NO_ADDRESS: gettext_lazy("The account has no e-mail address."),
        DeliveryProblem.MAIL_OFF: gettext_lazy("This server sends no e-mail: DSTACKWEB_EMAIL_URL is not set."),
        DeliveryProblem.MAIL_REFUSED: gettext_lazy("The mail server refused it."),
        DeliveryProblem.BAD_KEY: gettext_lazy("Its URL was stored with another secret key. Set up the channel again."),
    }
)
"""Why a notification was not delivered, as a sentence."""


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
        case NotificationEvent.RUN_DISPLACED:
            return Label(_("%(run)s is displaced") % data, _displaced(data["data"]), "wait")
        case NotificationEvent.RUN_KEPT:
            text = fill("%(text)s.", text=policy.kept(data["data"]).capitalized())
            return Label(_("%(by)s keeps %(run)s") % data, text, "info")
        case NotificationEvent.TASKS_FAIL:
            text = fill("%(text)s.", text=events.tasks_fail(data["data"]).capitalized())
            return Label(_("%(run)s: more tasks fail") % data, text, "bad")
        case NotificationEvent.QUEUE_STUCK:
            return _stuck(data)
        case NotificationEvent.BACKEND_FAILS:
            title = _("Backend %(backend)s cannot be read") % data
            where = f"{data['region']}: " if data["region"] else ""
            return Label(title, where + offers.failure(data["backend_kind"], data["failure"] or {}), "bad")
        case NotificationEvent.API_LIMIT:
            return _api_limit(data)
        case NotificationEvent.BUDGET_SPENT:
            return _budget(data)
        case NotificationEvent.HOST_HELD_BACK:
            return _held_back(data)
        case NotificationEvent.TEST:
            return Label(_("Test of notifications"), _("Sent by %(by)s. No action is needed.") % data, "info")
        case None:
            return Label(as_text(event), "", "info")
        case never:
            assert_never(never)


def _displaced(data: Data) -> str:
    if data.get("queue"):
        text = _(
            "It stops for %(whose)s, which takes back GPUs that queue %(queue)s lent, keeps its place in the queue and "
            "starts again."
        )
        return text % {"whose": events.whose(data), "queue": data["queue"]}
    return _("It stops for %s, keeps its place in the queue and starts again.") % events.whose(data)


def _ended(data: Data) -> Label:
    title = _("%(run)s: %(status)s") % {"run": data["run"], "status": statuses.status(data["status"])}
    text = statuses.message(data.get("detail") or {}, data.get("message") or "")
    text = text or (statuses.termination(data["reason"]) if data.get("reason") else "")
    return Label(title, text, {"done": "go", "failed": "bad"}.get(data["status"], "wait"))


def _stuck(data: Data) -> Label:
    waiting = ngettext("%(n)d run waits.", "%(n)d runs wait.", data["waiting"]) % {"n": data["waiting"]}
    return Label(_("Queue %(queue)s is stuck") % data, f"{waiting} {queue_stuck(data['code'])}", "wait")


def _api_limit(data: Data) -> Label:
    where = f"{data['api']} ({data['region']})" if data["region"] else data["api"]
    if data["throttles"]:
        text = _("%(throttles)d of %(requests)d requests were throttled lately. They are repeated later.")
        return Label(_("%s is throttled") % where, text % data, "wait")
    text = _("After %(tight)d of %(requests)d requests few calls were left. Further calls wait.")
    return Label(_("%s is near its rate limit") % where, text % data, "wait")


def _budget(data: Data) -> Label:
    title = _("%(project)s has spent %(percent)d %% of its budget") % data
    numbers = {"spent": dollars(data["spent"]), "budget": dollars(data["budget"])}
    if data["percent"] < 100:
        text = _("%(spent)s of %(budget)s this month. At 100 %% runs no longer start on paid backends.")
    else:
        text = _("%(spent)s of %(budget)s this month. Until the month ends, runs start on free backends alone.")
    return Label(title, text % numbers, "wait" if data["percent"] < 100 else "bad")


def _held_back(data: Data) -> Label:
    text = _("Starts fail: %s. Running jobs continue. It gets jobs again once a start works.")
    return Label(_("Host %(host)s is held back") % data, text % hosts.start_error(data["error"]).rstrip(".。"), "bad")


def _stops_soon(data: Data) -> Label:
    found, text = data["data"], Sentence("")
    if data["kind"] == RunEventKind.UTILIZATION_NOTICE:
        title, text = _("%(run)s is about to be stopped"), policy.notice(found)
    elif data["kind"] == RunEventKind.INACTIVITY_NOTICE:
        title, text = _("%(run)s is about to be stopped"), policy.inactive(found)
    else:
        title, text = _("%(run)s leaves GPUs unused"), Sentence(policy.was_low(found))
    return Label(title % data, fill("%(text)s.", text=text.capitalized()), "wait")


class Mail(NamedTuple):
    subject: str
    text: str


def password_mail(username: str, link: str, valid_s: float) -> Mail:
    """With the link that sets a new password."""
    text = _(
        "Set a new password for %(username)s:\n\n%(link)s\n\n"
        "The link works once, within %(time)s. If you did not ask for it, ignore this mail: your password is "
        "unchanged.\n"
    )
    values = {"username": username, "link": link, "time": duration(valid_s)}
    return Mail(_("New password for dstackweb"), text % values)
