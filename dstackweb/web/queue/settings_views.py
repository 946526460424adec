"""A queue's settings (managers edit, others read), its latest changes, new queues, and saved filters and columns."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpResponse, HttpResponseBase, QueryDict
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _, gettext_lazy
from django.views.decorators.http import require_http_methods

from dstackweb.accounts import saved_views
from dstackweb.accounts.access import need_role
from dstackweb.accounts.models import Role
from dstackweb.lib.forms import MergedForm
from dstackweb.runs import services
from dstackweb.runs.codes import Reclaim
from dstackweb.runs.models import MAX_LIMIT, Queue
from dstackweb.runs.queue import queues
from dstackweb.runs.queue.ordering import PRIORITY_MAX
from dstackweb.scheduler.passes.loading import usage_of
from dstackweb.web.accounts.forms import SettingsForm, Styled, Switch, attempt, form_status
from dstackweb.web.common.pages import PageRequest, done, notice, project_action, project_page, queue_url, yes_or_no
from dstackweb.web.queue.views import fragment, share_bars, usage
from dstackweb.wording import queue as queue_words
from dstackweb.wording.queue_filters import worth_saving

CHANGES_SHOWN = 12


NO_LIMIT, OFF = gettext_lazy("no limit"), gettext_lazy("off")


def _number(
    label: Any, empty: Any = NO_LIMIT, help_text: Any = "", least: int = 1, most: int = MAX_LIMIT
) -> forms.IntegerField:
    """`empty` is what an empty field means; None where it may not be empty."""
    placeholder = {} if empty is None else {"placeholder": empty}
    return forms.IntegerField(
        label=label, help_text=help_text, required=empty is None, min_value=least, max_value=most,
        widget=forms.NumberInput(attrs={**placeholder, "inputmode": "numeric"}),
    )  # fmt: skip


class QueueForm(MergedForm, SettingsForm):
    """The settings that managers edit. An empty limit means none, empty ageing strict priority."""

    ageing_minutes = _number(
        gettext_lazy("Ageing: minutes of waiting per priority point"),
        gettext_lazy("strict"),
        gettext_lazy("Empty: strict priority, no ageing."),
        most=60 * 24 * 365,
    )
    fair_share_minutes = _number(
        gettext_lazy("Maximum penalty, minutes"), OFF, gettext_lazy("Empty: off."), most=60 * 24 * 30
    )
    fair_share_half_life_days = _number(gettext_lazy("Half-life of past usage, days"), None, most=90)
    draining = forms.BooleanField(
        label=gettext_lazy("Drain: reject new submissions; waiting runs still start"), required=False, widget=Switch
    )
    paused = forms.BooleanField(
        label=gettext_lazy("Pause: no runs start; running runs continue"), required=False, widget=Switch
    )
    max_running = _number(gettext_lazy("Max running runs"), least=0)
    max_gpus = _number(gettext_lazy("Max GPUs in use"), least=0)
    max_running_per_user = _number(gettext_lazy("Max running runs per member"), least=0)
    max_gpus_per_user = _number(gettext_lazy("Max GPUs per member"), least=0)
    cohort = forms.SlugField(
        label=gettext_lazy("Cohort"),
        help_text=gettext_lazy("Queues of the same cohort lend each other unused GPUs of their limits. Empty: none."),
        required=False,
        max_length=60,
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "none"}),
    )
    borrow_gpus = _number(gettext_lazy("Max GPUs to borrow"), least=0)
    lend_gpus = _number(gettext_lazy("Max GPUs to lend"), least=0)
    reclaim = forms.ChoiceField(
        label=gettext_lazy("When its own runs need lent GPUs"),
        help_text=gettext_lazy(
            "Only runs with “preemptible: true” are displaced; they are queued again. Each queue keeps what it owns."
        ),
        choices=lambda: [(each.value, queue_words.reclaim(each)) for each in Reclaim],  # in the reader's language
    )
    preempt_points = _number(
        gettext_lazy("Minimum difference in priority"),
        OFF,
        gettext_lazy("Empty: off. Only runs with “preemptible: true” are displaced; they are queued again."),
        most=PRIORITY_MAX,
    )
    preempt_gpu_hours = _number(
        gettext_lazy("GPU-hours of work that a member's runs may displace within 24 hours"),
        help_text=gettext_lazy("Empty: no limit."),
    )

    def shown_ageing(self) -> str:
        """The hidden input with the ageing that was shown, whose field the template writes by itself."""
        return self["ageing_minutes"].as_hidden(only_initial=True)


class NewQueueForm(Styled):
    name = forms.SlugField(
        label=gettext_lazy("Name"),
        max_length=60,
        help_text=gettext_lazy("Letters, digits, hyphens and underscores. Run files select it with “queue: nightly”."),
        widget=forms.TextInput(attrs={"placeholder": "nightly", "autocomplete": "off", "autocapitalize": "none"}),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@project_page()
def settings_page(request: PageRequest, queue: str) -> HttpResponse:
    """The settings with usage of each limit; saves them; htmx requests get the sentence for the typed ageing."""
    found = services.find_queue(request.project, queue)
    if request.htmx and request.method != "POST":
        form = QueueForm(request.GET)
        form.is_valid()
        minutes = form.cleaned_data.get("ageing_minutes")
        sentence = "" if "ageing_minutes" in form.errors else queue_words.ageing(minutes)
        return HttpResponse(sentence, content_type="text/plain; charset=utf-8")
    form = _settings_form(found, request.POST if request.method == "POST" else None)
    if request.method == "POST":
        saved = attempt(form, lambda: queues.change_queue(found, request.user, request.role, **form.changes))
        if saved is not None:
            return done(request, _("Settings of queue %s saved") % saved.name, queue_url(request.project, found.name))
    return _settings_page(request, found, form, NewQueueForm())


def _settings_form(queue: Queue, data: QueryDict | None = None) -> QueueForm:
    now = {name: getattr(queue, name) for name in QueueForm.base_fields}
    return QueueForm(data, initial=now, auto_id="queue-%s")


def _settings_page(request: PageRequest, queue: Queue, form: QueueForm, new_queue: NewQueueForm) -> HttpResponse:
    """The settings and their usage; the forms are for managers."""
    forms_of_managers = {"form": form, "new_queue": new_queue} if request.may["manager"] else {}
    status = form_status(form, new_queue)
    return render(request, "queue/settings.html", _context(request, queue) | forms_of_managers, status=status)


def _context(request: PageRequest, queue: Queue) -> dict[str, Any]:
    events = queue.events.select_related("actor").order_by("-pk")[:CHANGES_SHOWN]
    return {
        "queue": queue,
        "queues": Queue.objects.filter(project=request.project),
        "ageing": queue_words.ageing(queue.ageing_minutes),
        "fair_share": queue_words.fair_share(queue.fair_share_minutes, queue.fair_share_half_life_days),
        "shares": share_bars(queue),
        "preemption": queue_words.preemption(queue.preempt_points, queue.preempt_gpu_hours),
        "reclaim": queue_words.reclaim(queue.reclaim),
        "usage": usage(queue, request.user, usage_of(queue)),
        "changes": [(event, queue_words.changed(event.data)) for event in events],
    }


@project_page()
def queues_page(request: PageRequest) -> HttpResponseBase:
    """The list of queues is on each queue's page; a form posted here makes a new one."""
    if request.method == "POST":
        return new_queue(request, project=request.project.name)
    return redirect(queue_url(request.project, "default"))


@project_page("manager")
def new_queue(request: PageRequest) -> HttpResponse:
    form = NewQueueForm(request.POST)
    made = attempt(
        form, lambda: queues.create_queue(request.project, request.user, request.role, form.cleaned_data["name"])
    )
    if made is None:
        default = services.find_queue(request.project, "default")
        return _settings_page(request, default, _settings_form(default), form)
    return done(request, _("Queue %s created") % made.name, "web:queue-settings", request.project.name, made.name)


@project_action()
def set_paused(request: PageRequest, queue: str) -> HttpResponse:
    """Pause or resume a queue, from its own page."""
    paused = yes_or_no(request, "paused")
    found = queues.change_queue(services.find_queue(request.project, queue), request.user, request.role, paused=paused)
    text = (_("Queue %s paused; running runs continue") if found.paused else _("Queue %s resumed")) % found.name
    if not request.htmx:
        messages.success(request, text)
    return notice(fragment(request, found), text)


@project_action()
def save_view(request: PageRequest, queue: str) -> HttpResponseBase:
    """Save what the page shows. Back to the page, with these filters."""
    query = worth_saving(request.POST.get("query", ""))
    shared = request.POST.get("shared") == "yes"
    if shared:
        need_role(request.role, request.project.name, Role.MANAGER)
    view = saved_views.save(request.project, None if shared else request.user, request.POST.get("name", ""), query)
    return done(request, _("View %s saved") % view.name, f"{queue_url(request.project, queue)}?{view.query}")


@project_action()
def make_default_view(request: PageRequest, queue: str, view: int) -> HttpResponseBase:
    """Have the reader's queue pages begin with a view, or no longer (`default` is `no`)."""
    is_chosen = yes_or_no(request, "default")
    found = saved_views.set_default(request.project, view, request.user, chosen=is_chosen)
    text = _("The queue opens with %s") if is_chosen else _("The queue no longer opens with %s")
    return done(request, text % found.name, f"{queue_url(request.project, queue)}?{found.query}")


@project_action()
def delete_view(request: PageRequest, queue: str, view: int) -> HttpResponseBase:
    deleted = saved_views.delete(request.project, view, request.user, shared=request.may["manager"])
    return done(request, _("View %s deleted") % deleted.name, queue_url(request.project, queue))
