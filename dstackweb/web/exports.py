"""CSV and JSON files of what pages list, with the permissions of the page."""

from __future__ import annotations

from django.http.response import HttpResponseBase
from django.utils import timezone
from django.views.decorators.http import require_safe

from dstackweb.lib import exports
from dstackweb.runs import services, usage_report
from dstackweb.web.common.pages import PageRequest, project_page
from dstackweb.web.history import HistoryFilters
from dstackweb.web.runs.views import run_filters
from dstackweb.web.usage import UsageFilters
from dstackweb.wording import tables


@require_safe
@project_page()
def runs(request: PageRequest, form: str) -> HttpResponseBase:
    """The runs that the filters of the list select."""
    found = tables.run_table(request.project, timezone.now(), **run_filters(request))
    return exports.response(f"runs-{request.project.name}", form, tables.RUN_COLUMNS, found)


@require_safe
@project_page()
def queue(request: PageRequest, queue: str, form: str) -> HttpResponseBase:
    """A queue as it stands."""
    found = services.find_queue(request.project, queue)
    return exports.response(f"queue-{found.name}", form, tables.QUEUE_COLUMNS, tables.queue_table(found))


@require_safe
@project_page()
def history(request: PageRequest, form: str) -> HttpResponseBase:
    """Waits and lengths of all queues of the project, or of the one called `queue`, by hour, day or 5 minutes."""
    name = request.GET.get("queue", "")
    one = services.find_queue(request.project, name) if name else None
    of = {"queue": one} if one else {"queue__project": request.project}
    found = tables.history_table(request.project, HistoryFilters.of(request).view(**of), one)
    return exports.response(f"history-{name or request.project.name}", form, tables.HISTORY_COLUMNS, found)


@require_safe
@project_page()
def usage(request: PageRequest, form: str) -> HttpResponseBase:
    """Usage per month, as the page adds it up; of the whole deployment for its admins, with `all=yes`."""
    filters = UsageFilters.of(request)
    found = usage_report.rows(filters.project, filters.period, filters.by, timezone.now())
    return exports.response("usage", form, usage_report.columns(filters.by), found)
