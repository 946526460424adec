"""The command palette and the list of keys, which pages load when they are first wanted."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.http import HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.runs import rows
from dstackweb.runs.row_fields import RunPageRow
from dstackweb.runs.states import ENDED, WAITING, RunStatus
from dstackweb.web.common.pages import PageRequest, project_page
from dstackweb.wording import statuses, units

FOUND = 8
"""Runs that it offers."""


class KeyPresses(NamedTuple):
    """Keys to press one after the other, or, with a slash between them, alternatives."""

    keys: tuple[str, ...]
    text: Any


KEYS = (
    KeyPresses(("Ctrl+K",), gettext_lazy("Go to a page or run, stop, set a priority, submit again")),
    KeyPresses(("?",), gettext_lazy("Show these keys")),
    KeyPresses(("/",), gettext_lazy("Search the list")),
    KeyPresses(("g", "q"), gettext_lazy("Queue")),
    KeyPresses(("g", "r"), gettext_lazy("Runs")),
    KeyPresses(("g", "p"), gettext_lazy("Progress")),
    KeyPresses(("g", "g"), gettext_lazy("GPUs")),
    KeyPresses(("g", "u"), gettext_lazy("Utilization")),
    KeyPresses(("g", "o"), gettext_lazy("Offers")),
    KeyPresses(("g", "h"), gettext_lazy("Hosts")),
    KeyPresses(("g", "e"), gettext_lazy("Health")),
    KeyPresses(("j", "k"), gettext_lazy("On a row of the queue: next, previous row")),
    KeyPresses(("m",), gettext_lazy("On a row: its menu")),
    KeyPresses(("x",), gettext_lazy("On a row: select it")),
    KeyPresses(("Shift+J", "Shift+K"), gettext_lazy("On a row: move it down, up by one")),
    KeyPresses(("↑", "↓"), gettext_lazy("On a handle: move the row; Enter drops it, Esc puts it back")),
    KeyPresses(("Ctrl+Z",), gettext_lazy("Undo the last change")),
)


@project_page()
def palette(request: PageRequest) -> HttpResponse:
    """Both dialogs, as a fragment."""
    return render(request, "common/palette.html", {"keys": KEYS})


@project_page()
def palette_runs(request: PageRequest) -> HttpResponse:
    """The newest runs whose name contains `q`, of those that the reader may do `verb` to; without one all of them."""
    verb, text = request.GET.get("verb", ""), request.GET.get("q", "").strip()
    open_ones = [status for status in RunStatus if status not in ENDED]
    wanted = {"why": [RunStatus.SUBMITTED], "stop": open_ones, "priority": open_ones}.get(verb, [])
    own = verb in ("stop", "priority") and not request.may["manager"]
    found, _next = rows.newest_rows(
        request.project,
        statuses=[status.value for status in wanted],
        user=request.user.username if own else "",
        text=text,
        limit=FOUND,
        kind=RunPageRow,
    )
    return JsonResponse({"runs": [_cell(row) for row in found]})


def _cell(row: RunPageRow) -> dict[str, Any]:
    waits = row.status in WAITING
    question = _("Cancel %s? It will be marked terminated.") if waits else _("Stop %s? Its processes can exit first.")
    return {
        "id": str(row.id),
        "name": row.name,
        "priority": row.priority,
        "about": f"{statuses.status(row.status)} · {row.user} · {units.needs(row.spec)}",
        "question": question % row.name,
        "yes": _("Cancel run") if waits else _("Stop run"),
    }
