"""Holding GPUs for interactive work: the form, the panel on the run's page, extending. Also a run's recurrence."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from django import forms
from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST

from dstackweb.backends.hosts.inventory import host_views
from dstackweb.lib.errors import Invalid
from dstackweb.runs import holds, selectors, services
from dstackweb.runs.models import Job, Queue, Run
from dstackweb.runs.queue.ordering import PRIORITY_DEFAULT
from dstackweb.runs.states import ENDED, Reason, RunStatus
from dstackweb.scheduler.passes.decision import plan
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.web.accounts.forms import Styled, attempt
from dstackweb.web.common.pages import PageRequest, done, done_here, project_page
from dstackweb.web.runs.rows import max_priority
from dstackweb.wording import units, waiting

PLAIN = {"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}
"""For words that are not prose."""
TIMES = ("1h", "2h", "3h", "4h", "8h", "12h", "1d", "2d", "7d")
MORE = ("30m", "1h", "2h", "4h", "8h")


class HoldForm(Styled):
    """What to hold and for how long, in the notation of run files."""

    gpu = forms.CharField(
        label=gettext_lazy("GPUs"),
        required=False,
        max_length=200,
        help_text=gettext_lazy("Count, or model and count such as A100:2."),
        widget=forms.TextInput(attrs=PLAIN),
    )
    duration = forms.ChoiceField(label=gettext_lazy("Duration"))
    cpu = forms.CharField(
        label=gettext_lazy("CPUs"), required=False, max_length=20, widget=forms.TextInput(attrs={"placeholder": "1"})
    )
    memory = forms.CharField(
        label=gettext_lazy("Memory"),
        required=False,
        max_length=20,
        widget=forms.TextInput(attrs={"placeholder": "16GB", "autocapitalize": "none"}),
    )
    priority = forms.IntegerField(label=gettext_lazy("Priority"), min_value=0)
    queue = forms.ChoiceField(label=gettext_lazy("Queue"))
    name = forms.CharField(
        label=gettext_lazy("Name"),
        required=False,
        max_length=60,
        help_text=gettext_lazy("Generated if empty."),
        widget=forms.TextInput(attrs=PLAIN),
    )

    def __init__(self, request: PageRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        queues = Queue.objects.filter(project=request.project).values_list("name", flat=True)
        for name, choices in (
            ("queue", [(name, name) for name in queues] or [("default", "default")]),
            ("duration", times(TIMES)),
        ):
            field = self.fields[name]
            assert isinstance(field, forms.ChoiceField)
            field.choices = choices
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
    return done(request, _("%s submitted") % run.name, reverse("web:run", args=[request.project.name, run.name]))


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


@require_POST
@project_page("member")
def extend(request: PageRequest, run: str) -> HttpResponse:
    duration = request.POST.get("for", "").strip()
    found = holds.extend(selectors.find_run(request.project, run), request.user, request.role, duration)
    numbers = {"run": found.name, "more": units.duration(holds.parse_hold_time(duration))}
    text = _("%(run)s extended by %(more)s") % numbers
    return done_here(request, text, reverse("web:run", args=[request.project.name, run]))


class Recurrence(NamedTuple):
    """When a scheduled run recurs (`at`), with the next and the previous run."""

    crons: str
    at: dt.datetime | None
    following: str
    previous: str
    over: bool


def recurrence(run: Run) -> Recurrence | None:
    """None for a run without a schedule."""
    if not (crons := (run.spec.get("schedule") or {}).get("cron")):
        return None
    made = run.events.filter(kind="next_scheduled").last()
    # The next time comes from the schedule; of a later attempt it is the retry's back-off.
    waits = run.status in ENDED or (run.status == RunStatus.PENDING and run.attempt == 1)
    at = dt.datetime.fromisoformat(made.data["at"]) if made else run.retry_at if waits else None
    ended = run.status in ENDED and made is None and run.retry_at is None
    over = ended or run.stop_reason in (Reason.STOPPED_BY_USER, Reason.ABORTED_BY_USER)
    first = run.events.filter(kind="scheduled").first()
    following, previous = made.data["next"] if made else "", first.data["previous"] if first else ""
    return Recurrence(" · ".join(crons), at, following, previous, over)


def of_run(run: Run, jobs: Sequence[Job]) -> dict[str, Any]:
    return {"way_in": holds.access_to(run, jobs), "recurrence": recurrence(run), "more_times": times(MORE)}
