"""Why a run waits."""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Mapping
from typing import Any, assert_never, cast

from django.utils import timezone
from django.utils.translation import get_language, gettext as _, gettext_lazy, ngettext

from dstackweb.runs.codes import (
    BudgetData,
    Impossible,
    ImpossibleData,
    LimitCode,
    LimitData,
    PlanNote,
    ReservedData,
    Shortfall,
    Unavailable,
    UnavailableData,
    WaitReason,
)
from dstackweb.spec.units import format_duration
from dstackweb.wording.hosts import isolation
from dstackweb.wording.places import AMOUNTS, busy_until, lack, launch_failure, tried
from dstackweb.wording.sentence import Label, Sentence, as_text, clauses, fill, known, listing, words
from dstackweb.wording.units import dollars


def reason(code: str, data: Mapping[str, Any]) -> Label:
    found = known(WaitReason, code)
    return Label(as_text(code), "") if found is None else _reason(found, data)


def _reason(code: WaitReason, data: Mapping[str, Any]) -> Label:
    match code:
        case WaitReason.STARTING:
            return Label(_("starting"), _("the scheduler decides on it next"), "go")
        case WaitReason.QUEUE_PAUSED:
            return Label(_("paused"), _("the queue is paused; a manager can resume it"), "info")
        case WaitReason.WAITING_FOR_CAPACITY:
            today = timezone.now().astimezone(dt.UTC).date()
            return Label(_("capacity"), _capacity(json.dumps(data), get_language(), today))
        case WaitReason.IMPOSSIBLE:
            return Label(_("impossible"), _impossible(cast(ImpossibleData, data)), "bad")
        case WaitReason.BACKEND_UNAVAILABLE:
            return Label(_("unavailable"), _unavailable(cast(UnavailableData, data)), "bad")
        case WaitReason.NO_QUOTA:
            backends = listing(cast(UnavailableData, data).get("backends", ()))
            return Label(_("quota"), fill(_("the quota at %(backends)s is used up"), backends=backends))
        case WaitReason.BUDGET_LIMIT:
            return Label(_("budget"), _over_budget(cast(BudgetData, data)))
        case WaitReason.USER_LIMIT | WaitReason.QUEUE_LIMIT:
            return Label(_("limit"), _over_limit(cast(LimitData, data)), "bad" if data.get("never") else "wait")
        case WaitReason.RESERVED_FOR_OTHER:
            return Label(_("reserved"), _reserved(cast(ReservedData, data)))
        case WaitReason.NOT_WAITING:
            return Label(_("not waiting"), _("it is not in the queue"), "info")
        case never:
            assert_never(never)


name = words(
    {
        WaitReason.NOT_WAITING: gettext_lazy("not waiting"),
        WaitReason.IMPOSSIBLE: gettext_lazy("can never start"),
        WaitReason.NO_QUOTA: gettext_lazy("quota"),
        WaitReason.BUDGET_LIMIT: gettext_lazy("budget"),
        WaitReason.QUEUE_PAUSED: gettext_lazy("paused"),
        WaitReason.USER_LIMIT: gettext_lazy("member’s limit"),
        WaitReason.QUEUE_LIMIT: gettext_lazy("queue’s limit"),
        WaitReason.RESERVED_FOR_OTHER: gettext_lazy("reserved"),
        WaitReason.BACKEND_UNAVAILABLE: gettext_lazy("backend unavailable"),
        WaitReason.WAITING_FOR_CAPACITY: gettext_lazy("capacity"),
        WaitReason.STARTING: gettext_lazy("starting"),
    }
)
"""A reason to choose from a list."""

ABOUT_NEEDS = (WaitReason.WAITING_FOR_CAPACITY, WaitReason.IMPOSSIBLE)
"""Reasons that depend on what a run needs."""


def shared(code: str, needs: str, runs: int) -> str:
    """What so many runs wait for: `27 runs wait for 2 CPUs`. `needs` is empty unless the reason is ABOUT_NEEDS."""
    found = known(WaitReason, code)
    text = as_text(code) if found is None else _shared(found, runs)
    return text % {"n": runs, "needs": needs or _("capacity")}


def _shared(code: WaitReason, n: int) -> str:
    match code:
        case WaitReason.STARTING:
            return ngettext("%(n)d run is about to start", "%(n)d runs are about to start", n)
        case WaitReason.QUEUE_PAUSED:
            return ngettext("%(n)d run waits for the queue", "%(n)d runs wait for the queue", n)
        case WaitReason.WAITING_FOR_CAPACITY:
            return ngettext("%(n)d run waits for %(needs)s", "%(n)d runs wait for %(needs)s", n)
        case WaitReason.IMPOSSIBLE:
            return ngettext("%(n)d run with %(needs)s cannot start", "%(n)d runs with %(needs)s cannot start", n)
        case WaitReason.BACKEND_UNAVAILABLE:
            return ngettext("%(n)d run waits for a backend", "%(n)d runs wait for a backend", n)
        case WaitReason.NO_QUOTA:
            return ngettext("%(n)d run waits for quota", "%(n)d runs wait for quota", n)
        case WaitReason.BUDGET_LIMIT:
            return ngettext("%(n)d run waits for budget", "%(n)d runs wait for budget", n)
        case WaitReason.USER_LIMIT:
            return ngettext("%(n)d run waits for its member’s limit", "%(n)d runs wait for their member’s limit", n)
        case WaitReason.QUEUE_LIMIT:
            return ngettext("%(n)d run waits for the queue’s limit", "%(n)d runs wait for the queue’s limit", n)
        case WaitReason.RESERVED_FOR_OTHER:
            return ngettext("%(n)d run waits behind a reservation", "%(n)d runs wait behind a reservation", n)
        case WaitReason.NOT_WAITING:
            return ngettext("%(n)d run is not waiting", "%(n)d runs are not waiting", n)
        case never:
            assert_never(never)


def _over_budget(data: BudgetData) -> str:
    numbers = {"spent": dollars(data.get("spent", 0)), "budget": dollars(data.get("budget", 0))}
    return _("the project has spent %(spent)s of its monthly budget of %(budget)s for paid backends") % numbers


def _over_limit(data: LimitData) -> str:
    code = data.get("code", "")
    if known(LimitCode, code) is None:
        return _("a limit is reached")
    text = _NEVER_WITHIN(code) if data.get("never") else _NOT_WITHIN_NOW(code)
    return text % {name: data.get(name, 0) for name in ("limit", "used", "asked")}


_NEVER_WITHIN = words(
    {
        LimitCode.MAX_RUNNING: gettext_lazy("the queue's limit is 0 runs: nothing can start"),
        LimitCode.MAX_GPUS: gettext_lazy("it needs %(asked)d GPUs, more than the queue's limit of %(limit)d"),
        LimitCode.MAX_RUNNING_PER_USER: gettext_lazy("the queue's limit is 0 runs per member: nothing can start"),
        LimitCode.MAX_GPUS_PER_USER: gettext_lazy(
            "it needs %(asked)d GPUs, more than the limit of %(limit)d per member"
        ),
        LimitCode.COHORT_GPUS: gettext_lazy("it needs %(asked)d GPUs, more than the %(limit)d that its cohort shares"),
    }
)
plan_note = words(
    {
        PlanNote.NOT_PREEMPTED: gettext_lazy(
            "preemptible has no effect in this queue: preemption is off, and no queue takes back GPUs from it"
        ),
        PlanNote.WEAK_VALUE: gettext_lazy(
            "env copies a value from your shell that is too short or too common to be hidden in logs; "
            "write NAME=value if it is not secret"
        ),
        PlanNote.SERVICE_ENDS: gettext_lazy(
            "max_duration ends this service even while it is in use; for one without an end, set max_duration: off"
        ),
    }
)
_NOT_WITHIN_NOW = words(
    {
        LimitCode.MAX_RUNNING: gettext_lazy("queue limit reached: %(used)d of %(limit)d runs placed"),
        LimitCode.MAX_GPUS: gettext_lazy(
            "needs %(asked)d GPUs, and the queue's runs hold %(used)d of at most %(limit)d"
        ),
        LimitCode.MAX_RUNNING_PER_USER: gettext_lazy("member limit reached: %(used)d of %(limit)d runs placed"),
        LimitCode.MAX_GPUS_PER_USER: gettext_lazy(
            "needs %(asked)d GPUs, and the member's runs hold %(used)d of at most %(limit)d"
        ),
        LimitCode.COHORT_GPUS: gettext_lazy(
            "needs %(asked)d of the GPUs that its cohort shares, of which %(used)d of %(limit)d are in use"
        ),
    }
)


def _reserved(data: ReservedData) -> Sentence:
    """For which run, from when, and with which `max_duration` this one could start before."""
    other = data.get("run") or _("a run of another project")
    starts, until = data.get("starts_at"), data.get("starts_at") or data.get("expires_at")
    text = fill(_("free capacity is reserved for %(run)s, which has waited longest"), run=other)
    if not until:
        return text
    at = dt.datetime.fromisoformat(until)
    if starts:
        text = fill(_("free capacity is reserved for %(run)s, which starts by %(at)s"), run=other, at=at)
    else:
        text += fill(_(", until %(at)s at most"), at=at)
    left_s = (at - timezone.now()).total_seconds() - data.get("spare_s", 0)
    if left_s < 60:
        return text
    return text + _("; with max_duration: %s this run could start first") % format_duration(int(left_s // 60) * 60)


def _no_offer_available(data: Shortfall) -> str:
    if data.get("nodes", 1) > 1:
        numbers = {"placed": data.get("nodes_placed", 0), "nodes": data["nodes"]}
        return _("room for %(placed)d of %(nodes)d nodes in one region") % numbers
    count = data.get("offers", 0)
    text = ngettext("%d matching offer, not available now", "%d matching offers, none available now", count) % count
    if answers := data.get("answers"):
        return _("%(offers)s; refused lately: %(why)s") % {"offers": text, "why": listing(map(launch_failure, answers))}
    return text


@functools.lru_cache(1024)
def _capacity(data: str, _language: str, _today: dt.date) -> str:
    """Most of a queue waits for this, and it changes with a pass: the texts were two fifths of a list's time."""
    short: Shortfall = json.loads(data)
    return _no_offer_available(short) if short.get("code") == "offers" else _shortfall(short)


def _shortfall(data: Shortfall) -> Sentence:
    """`needs 4 GPUs, 1 of 8 free on gpu-box-1`: each thing that the closest host lacks, with its numbers."""
    lacks = [lack(what, data) for what in data.get("short", ())]
    text = Sentence(clauses(lacks) or _("no host has enough free"))
    if lacks and data.get("host"):
        text = fill(_("%(lacks)s on %(host)s"), lacks=text, host=data["host"])
    text += busy_until(data)
    if data.get("nodes", 1) > 1:
        placed = data.get("nodes_placed", 0)
        text = fill(
            _("room for %(placed)d of %(nodes)d nodes; %(text)s"), placed=placed, nodes=data["nodes"], text=text
        )
    return text


def _impossible(data: ImpossibleData) -> str:
    code = known(Impossible, data.get("code", ""))
    match code:
        case Impossible.NO_SPOT_ON_HOSTS:
            return _("it requires spot instances, and hosts are not spot")
        case Impossible.NO_OFFER:
            return _no_offer(data.get("refused", {}))
        case Impossible.IMAGE_NOT_SUPPORTED:
            return _("it needs the image %s, and no host has Docker or Podman") % data.get("image", "")
        case Impossible.NO_SUCH_PLACE:
            return _no_such_place(data)
        case Impossible.TOO_LARGE:
            return _too_large(data)
        case None:
            return _("no host can run it")
        case never:
            assert_never(never)


def _too_large(data: ImpossibleData) -> str:
    """The numbers are those of the closest host now: only what it will never have makes it impossible."""
    numbers: Mapping[str, Any] = data
    lacks = [_most(what, data) for what in data.get("short", ()) if numbers[f"{what}_total"] < numbers.get(what, 0)]
    if lacks:
        return _("no host has enough: %s") % clauses(lacks)
    if data.get("nodes", 1) > 1:
        return _("the hosts cannot hold all %d nodes at the same time") % data["nodes"]
    return _("no host can run it")


def _most(what: str, data: ImpossibleData) -> str:
    """What is required, and the most that any host has in all."""
    numbers: Mapping[str, Any] = data
    amount, _plain = AMOUNTS[what]
    needs, total = amount(numbers.get(what, 0)), numbers.get(f"{what}_total", 0)
    if what == "gpus" and not total:
        return _("%s required, none available") % needs
    return _("%(needs)s required, at most %(total)s on one host") % {"needs": needs, "total": amount(total)}


def _no_offer(refused: Mapping[str, int]) -> str:
    if not refused:
        return _("none of its backends has a matching offer")
    each = [f"{count} × {tried(code, {}).label}" for code, count in refused.items()]
    return _("no offer matches: %s") % listing(each)


def _no_such_place(data: ImpossibleData) -> str:
    """`none of 3 hosts has the label disk=nvme`, or that no single host has everything the run names."""
    total, missing = data.get("hosts_total", 0), data.get("missing", ())
    if missing:
        one = _("none of %(total)d hosts has the label %(labels)s")
        more = _("none of %(total)d hosts has any of the labels %(labels)s")
        if total == 1:
            one, more = _("the only host lacks the label %(labels)s"), _("the only host lacks the labels %(labels)s")
        return (one if len(missing) == 1 else more) % {"total": total, "labels": listing(missing)}
    if folders := data.get("volumes"):
        return _("no host lets jobs mount %s") % listing(folders)
    if least := data.get("isolation"):
        return _no_isolated_place(least, data)
    named = listing([*data.get("regions", ()), *data.get("instance_types", ()), *data.get("labels", ())])
    if data.get("labels"):
        return _("no host matches all of %s") % named
    return _("no host has the region or instance type that it names: %s") % named


def _no_isolated_place(least: str, data: ImpossibleData) -> str:
    needs = _("its project requires hosts with this isolation or a stronger one: %s") % isolation(least)
    named = listing([*data.get("regions", ()), *data.get("instance_types", ()), *data.get("labels", ())])
    return _("%(needs)s; none is among %(named)s") % {"needs": needs, "named": named} if named else needs


_UNAVAILABLE = words(
    {
        Unavailable.NO_HOSTS: gettext_lazy("no host has joined yet"),
        Unavailable.HOSTS_OFFLINE: gettext_lazy("the matching hosts are offline, draining or held back: %(hosts)s"),
        Unavailable.NO_ISOLATION: gettext_lazy(
            "the matching hosts refuse jobs because they cannot isolate them: %(hosts)s"
        ),
        Unavailable.NO_SUCH_BACKEND: gettext_lazy("it names backends that are not set up: %(backends)s"),
        Unavailable.OTHER_PROJECT: gettext_lazy("these backends take no runs of its project: %(backends)s"),
        Unavailable.TOO_LITTLE_ISOLATION: gettext_lazy(
            "these backends isolate jobs less than its project requires: %(backends)s"
        ),
        Unavailable.NOT_SERVED: gettext_lazy("this server does not support the kind of these backends: %(backends)s"),
        Unavailable.FAILED: gettext_lazy("the offers of these backends cannot be read: %(backends)s"),
        Unavailable.PARTLY_READ: gettext_lazy("some offers of these backends are not known yet: %(backends)s"),
        Unavailable.NO_BACKEND: gettext_lazy("no backend that it may use is set up"),
        Unavailable.UNREADABLE: gettext_lazy(
            "another version stored its settings, and this one cannot read them; submit it again"
        ),
    }
)


def _unavailable(data: UnavailableData) -> str:
    if known(Unavailable, code := data.get("code", "")) is None:
        return _("its backend is not available")
    hosts, backends = listing(data.get("hosts", ())), listing(data.get("backends", ()))
    return _UNAVAILABLE(code) % {"hosts": hosts, "backends": backends}
