"""The words for what utilization policies say and do: codes and numbers become sentences (docs/design.md, rule 11)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.utils.translation import gettext as _

from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.wording import units


def span(seconds: int) -> str:
    """A window or a time of grace in the unit that says it exactly: `90 s`, `30 min`, `1 h`, `1 h 30`."""
    if seconds % 60 or not seconds:
        return f"{seconds} s"
    if seconds >= 86_400 and seconds % 3600:
        return f"{seconds // 60} min"
    return units.duration(seconds).removesuffix(" 00")


def subject(gpu: int | None, node: int, nodes: int) -> str:
    """Which GPU it is about: `GPU 1`, `GPU 1 of node 2`, or (`gpu` None) all of a node's."""
    if gpu is None:
        return _("every GPU of node %d") % node if nodes > 1 else _("every GPU")
    return _("GPU %(gpu)d of node %(node)d") % {"gpu": gpu, "node": node} if nodes > 1 else _("GPU %d") % gpu


def rule(policy: UtilizationPolicy) -> str:
    """What a policy asks for, as a sentence."""
    numbers = {"min": policy.min_gpu_utilization, "window": span(policy.time_window_s)}
    if policy.scope == "all":
        text = _("When every GPU of a node is below %(min)s %% for %(window)s")
    else:
        text = _("When a GPU is below %(min)s %% for %(window)s")
    text = text % numbers + (_(", people are told") if policy.action == "notify" else _(", the run is stopped"))
    if policy.warmup_s:
        text += _("; not counted in the first %s") % span(policy.warmup_s)
    return text + "."


def held_back(codes: Iterable[str]) -> list[str]:
    """What holds a GPU's clocks down, from `newest.held_back`."""
    words = {
        "power_cap": _("at its power limit"),
        "power_brake": _("slowed down by its power supply"),
        "heat": _("slowed down by heat"),
        "hardware": _("slowed down by its hardware"),
    }
    return [words[code] for code in codes]


def was_low(data: dict[str, Any]) -> str:
    """What was low, from the data of an event: `GPU 1 was below 50 % for 30 min`."""
    numbers = {
        "what": subject(data.get("gpu"), data.get("node", 0), data.get("nodes", 1)),
        "min": data["min"],
        "window": span(data["window_s"]),
    }
    text = _("%(what)s was below %(min)s %% for %(window)s") % numbers
    return text[:1].upper() + text[1:]


def told(kind: str, data: dict[str, Any]) -> str | None:
    """The sentence of an event that policies make; None for any other."""
    match kind:
        case "utilization_notice":
            return _notice(data)
        case "utilization_stop":
            text = _("stopped by its utilization policy: %s") % was_low(data)
            return text + _("; first in line now: %s") % data["next"] if data.get("next") else text
        case "utilization_would_stop":
            why = _("its policy only notifies") if data.get("notifies") else _("policies only observe here")
            numbers = {"low": was_low(data), "why": why}
            return _("its utilization policy would have stopped it: %(low)s (%(why)s)") % numbers
        case "utilization_kept":
            numbers = {"until": units.moment(data["until"]), "reason": data["reason"]}
            return _("kept from being stopped until %(until)s: “%(reason)s”") % numbers
        case "utilization_next":
            return _("its GPUs went to %s") % (data.get("run") or _("a run of another project"))
        case "utilization_policy_changed":
            return _changed(data)
    return None


def _notice(data: dict[str, Any]) -> str:
    numbers = {
        "what": subject(data.get("gpu"), data.get("node", 0), data.get("nodes", 1)),
        "min": data["min"],
        "since": units.moment(data["low_since"]),
        "stops": units.moment(data["stops_at"]),
    }
    return _("%(what)s has been below %(min)s %% since %(since)s: it is stopped at %(stops)s, if it stays so") % numbers


def _changed(data: dict[str, Any]) -> str:
    """A policy that was applied to a run that had been submitted before."""
    after = data.get("after")
    if not after:
        return _("its utilization policy was taken away")
    return _("its utilization policy was changed: %s") % rule(UtilizationPolicy.model_validate(after))
