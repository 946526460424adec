"""A project's utilization policies: the ledger, simulating a policy, and whether policies are enforced."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from django import forms
from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.gpus.exemptions import policies_of, set_observe_only
from dstackweb.gpus.savings import LOOKS_BACK, StopEntry, ledger, parse_policy, what_if
from dstackweb.lib.errors import DomainError
from dstackweb.profiles import services as profiles
from dstackweb.spec.codes import UtilizationScope
from dstackweb.spec.run_file import parse_profile_settings
from dstackweb.spec.units import format_duration
from dstackweb.web.accounts.forms import CODE, Styled, attempt, text_field
from dstackweb.web.common.pages import PageRequest, done, project_action, project_page, yes_or_no
from dstackweb.wording import policy as policy_words

FALLBACK = {"min_gpu_utilization": 10, "time_window": "30m", "scope": UtilizationScope.ANY.value, "warmup": "0s"}
"""The form's initial values where the default profile has no policy."""


class WhatIfForm(Styled):
    """A policy to simulate, in the notation of the run file."""

    min_gpu_utilization = forms.IntegerField(
        label=gettext_lazy("Minimum utilization, %"),
        min_value=0,
        max_value=100,
        widget=forms.NumberInput(attrs={"inputmode": "numeric"}),
    )
    time_window = text_field(gettext_lazy("Time window"), 20, gettext_lazy("At least 1m, e.g. 30m, 2h."), **CODE)
    scope = forms.ChoiceField(
        label=gettext_lazy("Scope"),
        choices=[
            (UtilizationScope.ANY.value, gettext_lazy("any: one idle GPU")),
            (UtilizationScope.ALL.value, gettext_lazy("all: every GPU of a node")),
        ],
    )
    warmup = text_field(
        gettext_lazy("Warm-up"),
        20,
        gettext_lazy("Time after the start that doesn't count, e.g. 0s, 10m."),
        required=False,
        **CODE,
    )

    def clean_warmup(self) -> str:
        return self.cleaned_data["warmup"] or "0s"


@project_page()
def utilization_page(request: PageRequest) -> HttpResponse:
    """The ledger and the form; with a policy in the query string, also the result of simulating it."""
    now = timezone.now()
    simulate = "min_gpu_utilization" in request.GET
    form = WhatIfForm(request.GET if simulate else None, initial=_initial(request))
    began = time.perf_counter()
    result = attempt(form, lambda: what_if(request.project, parse_policy(form.cleaned_data), now)) if simulate else None
    found = ledger(request.project, now)
    context = {
        "form": form,
        "result": result,
        "took_s": time.perf_counter() - began,
        "rule": policy_words.rule(result.policy) if result else "",
        "stops": [
            (stop, policy_words.subject(stop.gpu_index, stop.node, stop.run.spec["nodes"]))
            for stop in (result.stops if result else ())
        ],
        "hours": LOOKS_BACK.total_seconds() / 3600,
        "ledger": found,
        "entries": [(entry, _low_text(entry)) for entry in found.entries],
        "policies": policies_of(request.project),
    }
    return render(request, "gpus/utilization.html", context, status=422 if simulate and result is None else 200)


@project_action()
def observe(request: PageRequest) -> HttpResponse:
    """Have policies only report what they would stop, or be enforced again."""
    policies = set_observe_only(request.project, request.role, yes_or_no(request, "observe_only"))
    if policies.observe_only:
        text = _("Policies are now observe only: violations are reported, no runs are stopped")
    else:
        text = _("Policies are now enforced: idle runs will be stopped")
    return done(request, text, "web:utilization", request.project.name)


def _initial(request: PageRequest) -> dict[str, Any]:
    """The default profile's policy, which most runs have; FALLBACK if there is none or it is invalid."""
    profile, policy = profiles.default(request.project), None
    if profile is not None:
        with contextlib.suppress(DomainError):
            policy = parse_profile_settings(profile.settings).utilization_policy
    if policy is None:
        return FALLBACK
    return {
        "min_gpu_utilization": policy.min_gpu_utilization,
        "time_window": format_duration(policy.time_window),
        "scope": policy.scope,
        "warmup": format_duration(policy.warmup),
    }


def _low_text(entry: StopEntry) -> str:
    stop = entry.stop
    nodes = stop.run.spec["nodes"] if stop.run else stop.node + 1
    low = {"gpu": stop.gpu_index, "node": stop.node, "nodes": nodes}
    return policy_words.was_low({**low, "min": stop.min_gpu_utilization, "window_s": stop.time_window_s})
