"""Holds, dev environments and services: the form of a hold, extending it, and how to connect, on the run's page."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy
from django.views.decorators.http import require_safe

from dstackweb.backends.hosts.inventory import host_views
from dstackweb.lib.errors import Forbidden, Invalid
from dstackweb.runs import connections, holds, selectors, services
from dstackweb.runs.connections import ENTER, may_open, ticket
from dstackweb.runs.models import Job, Queue, Run
from dstackweb.runs.queue.ordering import PRIORITY_DEFAULT
from dstackweb.runs.service_codes import ServiceState
from dstackweb.scheduler.passes.decision import plan
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.web.accounts.forms import CODE, Styled, attempt, text_field
from dstackweb.web.common.pages import PageRequest, done, done_here, fingerprint, project_action, project_page
from dstackweb.web.runs.rows import TONES, max_priority
from dstackweb.wording import gateway, units, waiting

PLAIN = {**CODE, "spellcheck": "false"}
TIMES = ("1h", "2h", "3h", "4h", "8h", "12h", "1d", "2d", "7d")
MORE = ("30m", "1h", "2h", "4h", "8h")


class HoldForm(Styled):
    """What to hold and for how long, in the notation of run files."""

    gpu = text_field(
        gettext_lazy("GPUs"), 200, gettext_lazy("Count, or model and count such as A100:2."), required=False, **PLAIN
    )
    duration = forms.ChoiceField(label=gettext_lazy("Duration"), choices=lambda: times(TIMES))
    cpu = text_field(gettext_lazy("CPUs"), 20, required=False, placeholder="1")
    memory = text_field(gettext_lazy("Memory"), 20, required=False, placeholder="16GB", autocapitalize="none")
    priority = forms.IntegerField(label=gettext_lazy("Priority"), min_value=0)
    queue = forms.ChoiceField(label=gettext_lazy("Queue"))
    name = text_field(gettext_lazy("Name"), 60, gettext_lazy("Generated if empty."), required=False, **PLAIN)

    def __init__(self, request: PageRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        queues = Queue.objects.filter(project=request.project).values_list("name", flat=True)
        names = [(name, name) for name in queues] or [("default", "default")]
        self.fields["queue"].choices = names  # type: ignore[attr-defined]
        self.fields["priority"].widget.attrs["max"] = max_priority(request)


def times(texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(text, units.duration(holds.parse_hold_time(text))) for text in texts]


@project_page("member")
def hold_page(request: PageRequest) -> HttpResponse:
    """The form; posting it submits the hold. `from` copies the request of another hold."""
    if request.method != "POST":
        return _form_page(request, HoldForm(request, initial=_initial(request)))
    form = HoldForm(request, request.POST)
    run = attempt(form, lambda: _with_form_errors(lambda: _hold(request, form.cleaned_data)))
    if not isinstance(run, Run):
        return _form_page(request, form, run or "", status=422)
    return done(request, _("%s submitted") % run.name, "web:run", request.project.name, run.name)


def _hold(request: PageRequest, fields: dict[str, Any]) -> Run | str:
    """The hold; or why no host could ever fit it, unless `anyway` is set."""
    wanted = holds.HoldRequest(**fields)
    if request.POST.get("anyway") != "yes" and (wanted.gpu or wanted.cpu):
        config = holds.run_config(wanted, holds.parse_hold_time(wanted.duration))
        planned = plan(request.project, request.user, request.role, services.Submission(config, hold=True))
        if planned.waits and planned.impossible:
            return waiting.reason(planned.waits.reason, planned.waits.data).text
    return holds.submit_hold(request.project, request.user, request.role, wanted)


def _with_form_errors(act: Callable[[], Run | str]) -> Run | str:
    """Map errors of the run file to fields of the form."""
    fields = {"for": "duration", "max_duration": "duration"}
    try:
        return act()
    except Invalid as error:
        for fault in error.errors:
            where = str(fault["loc"][-1 if fault["loc"][:1] == ["resources"] else 0]) if fault["loc"] else ""
            fault["loc"] = [fields.get(where, where)]
        raise


def _form_page(request: PageRequest, form: HoldForm, never: str = "", status: int = 200) -> HttpResponse:
    return render(request, "runs/hold.html", {"form": form, "models": gpu_models(), "never": never}, status=status)


def _initial(request: PageRequest) -> dict[str, Any]:
    """One GPU for three hours, or the request of the hold that `from` names."""
    initial: dict[str, Any] = {"gpu": "1", "duration": "3h", "priority": PRIORITY_DEFAULT, "queue": "default"}
    if "from" not in request.GET:
        return initial
    run = selectors.find_run(request.project, request.GET["from"])
    resources = EffectiveSpec.model_validate(run.spec).requirements.as_resources()
    given = run.provenance
    wanted = {key: text for key, text in resources.items() if given.get(f"resources.{key}", {}).get("source") == "hold"}
    own = {"gpu": "", "priority": run.spec["priority"], "queue": run.queue.name, **wanted}
    length = next(
        (text for text in TIMES if holds.parse_hold_time(text) == run.spec["max_duration_s"]), initial["duration"]
    )
    return {**initial, **own, "duration": length}


def gpu_models() -> list[tuple[str, int, int]]:
    """The GPU models of online hosts by name, how many are free, and how many there are."""
    total: Counter[str] = Counter()
    free: Counter[str] = Counter()
    for host in host_views():
        if host.takes_jobs:
            total.update(gpu.name for gpu in host.gpus)
            free.update(gpu.name for gpu in host.gpus if gpu.free)
    return [(name, free[name], count) for name, count in sorted(total.items())]


@project_action("member")
def extend(request: PageRequest, run: str) -> HttpResponse:
    duration = request.POST.get("for", "").strip()
    found = holds.extend(selectors.find_run(request.project, run), request.user, request.role, duration)
    numbers = {"run": found.name, "more": units.duration(holds.parse_hold_time(duration))}
    text = _("%(run)s extended by %(more)s") % numbers
    return done_here(request, text, "web:run", request.project.name, run)


@require_safe
@project_page("member")
def open_page(request: PageRequest, run: str) -> HttpResponse:
    """To the run's own pages, with a ticket that the gateway takes once.

    The address is made from settings: no page can have a ticket sent elsewhere.
    """
    found = selectors.find_run(request.project, run)
    if not may_open(request.user, found):
        raise Forbidden(
            _("run %(run)s belongs to %(user)s: only they or a manager can open it")
            % {"run": found.name, "user": found.user.get_username()}
        )
    connection = connections.connection_to(found)
    if connections.service_of(found) is None and (connection is None or not connection.opens):
        messages.error(request, _("%(run)s has no pages to open now.") % {"run": found.name})
        return redirect("web:run", request.project.name, found.name)
    response = HttpResponseRedirect(f"{connections.origin_of(found)}{ENTER}?ticket={ticket(request.user, found)}")
    response["Referrer-Policy"], response["Cache-Control"] = "no-referrer", "no-store"
    return response


def of_run(run: Run, jobs: Sequence[Job], may_connect: bool, has_key: bool) -> dict[str, Any]:
    """The values of the panels of a hold and of a dev environment, which are for those who may connect alone."""
    values: dict[str, Any] = {"way_in": holds.access_to(run, jobs), "more_times": times(MORE)}
    connection = connections.connection_to(run) if may_connect else None
    if connection is not None:
        no_key = bool(settings.DSTACKWEB_SSH_PORT) and not has_key
        values |= {"connection": connection, "no_key": no_key, **_ends(run, connection.stops_s)}
    return values


def of_service(run: Run, may_call: bool) -> dict[str, Any]:
    """The values of a service's panel. `may_call`: whether the reader may use it."""
    service = connections.service_of(run)
    if service is None:
        return {}
    health = service.health
    return {
        "service": service,
        "may_call": may_call,
        "health": gateway.service_state(health.state),
        "tone": TONES[health.state],
        "is_unknown": health.state == ServiceState.UNKNOWN,
        "failure": gateway.check_failure(health.error, health.error_data),
        **_ends(run, service.use.stops_s),
    }


def _ends(run: Run, stops_s: float | None) -> dict[str, dt.datetime | None]:
    """When it stops unless it is used, and when it ends in any case."""
    return {
        "stops_at": None if stops_s is None else timezone.now() + dt.timedelta(seconds=stops_s),
        "ends_at": run.started_at + dt.timedelta(seconds=run.limit_s) if run.started_at and run.limit_s else None,
    }


def stamp(run: Run) -> str:
    """What changes with the panel, for the version of the page."""
    service = connections.service_of(run)
    if service is not None:
        used, left = service.use.used_at, service.use.stops_s
        shown = service.health.state, service.health.error, service.health.error_data
        return "." + fingerprint((shown, used and used.replace(second=0, microsecond=0), left and left // 60))
    found = connections.connection_to(run)
    if found is None:
        return ""
    return f".{found.ready:d}.{found.stops_s // 60 if found.stops_s is not None else ''}"
