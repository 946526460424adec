"""Utilization policies: what they require, and what they did."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.gpus.selectors import ThrottleReason
from dstackweb.spec.codes import UtilizationAction, UtilizationScope
from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.wording.sentence import Sentence, capitalized, fill, words
from dstackweb.wording.units import exact_duration

Data = dict[str, Any]


def subject(gpu: int | None, node: int, nodes: int) -> str:
    """Which GPU it is about: `GPU 1`, `GPU 1 of node 2`, or (`gpu` None) all of a node's."""
    if gpu is None:
        return _("all GPUs of node %d") % node if nodes > 1 else _("all GPUs")
    return _("GPU %(gpu)d of node %(node)d") % {"gpu": gpu, "node": node} if nodes > 1 else _("GPU %d") % gpu


_rule = words(
    {
        UtilizationAction.TERMINATE: gettext_lazy("Stop the run when %(what)s below %(min)s %% for %(window)s"),
        UtilizationAction.NOTIFY: gettext_lazy("Notify when %(what)s below %(min)s %% for %(window)s"),
    }
)
_stays = words(
    {
        UtilizationScope.ANY: gettext_lazy("a GPU stays"),
        UtilizationScope.ALL: gettext_lazy("all GPUs of a node stay"),
    }
)


def rule(policy: UtilizationPolicy) -> str:
    """What a policy requires and does, as a sentence."""
    window = exact_duration(policy.time_window_s)
    text = _rule(policy.action) % {"what": _stays(policy.scope), "min": policy.min_gpu_utilization, "window": window}
    if policy.warmup_s:
        text += _(", not counting the first %s") % exact_duration(policy.warmup_s)
    return text + _(".")


throttled = words(
    {
        ThrottleReason.POWER_CAP: gettext_lazy("at its power limit"),
        ThrottleReason.POWER_BRAKE: gettext_lazy("slowed down by its power supply"),
        ThrottleReason.HEAT: gettext_lazy("slowed down by heat"),
        ThrottleReason.HARDWARE: gettext_lazy("slowed down by its hardware"),
    }
)
"""Why a GPU's clocks are reduced."""


def was_low(data: Data) -> str:
    """What was low, from the data of an event: `GPU 1 was below 50 % for 30 min`."""
    text = _("%(what)s was below %(min)s %% for %(window)s")
    if data.get("gpu") is None:
        text = _("%(what)s were below %(min)s %% for %(window)s")
    text %= {"what": _subject_of(data), "min": data["min"], "window": exact_duration(data["window_s"])}
    return capitalized(text)


def _subject_of(data: Data) -> str:
    return subject(data.get("gpu"), data.get("node", 0), data.get("nodes", 1))


def stop(data: Data) -> str:
    text = _("stopped by its utilization policy: %s") % was_low(data)
    return text + _("; first in the queue now: %s") % data["next"] if data.get("next") else text


def would_stop(data: Data) -> str:
    why = _("the policy only notifies") if data.get("notifies") else _("policies here only report")
    text = _("its utilization policy would have stopped it: %(low)s (%(why)s)")
    return text % {"low": was_low(data), "why": why}


def inactive(data: Data) -> Sentence:
    """An unused dev environment stops soon."""
    stops = dt.datetime.fromisoformat(data["stops_at"])
    return fill(_("unused for %(idle)s; it stops at %(stops)s unless it is used"),
                idle=exact_duration(data["idle_s"]), stops=stops)  # fmt: skip


def kept(data: Data) -> Sentence:
    """Someone exempted the run for a while."""
    until = dt.datetime.fromisoformat(data["until"])
    return fill(_("exempt from its policy until %(until)s: “%(reason)s”"), until=until, reason=data["reason"])


def notice(data: Data) -> Sentence:
    """The warning before the stop."""
    since, stops = data["low_since"], data["stops_at"]
    every = data.get("gpu") is None
    text = (
        _("%(what)s have been below %(min)s %% since %(since)s; the run stops at %(stops)s unless they are used")
        if every
        else _("%(what)s has been below %(min)s %% since %(since)s; the run stops at %(stops)s unless it is used")
    )
    return fill(
        text,
        what=_subject_of(data),
        min=data["min"],
        since=dt.datetime.fromisoformat(since),
        stops=dt.datetime.fromisoformat(stops),
    )


def changed(data: Data) -> str:
    """A policy was applied to a run that had been submitted before."""
    after = data.get("after")
    if not after:
        return _("its utilization policy was removed")
    return _("its utilization policy changed: %s") % rule(UtilizationPolicy.model_validate(after))
