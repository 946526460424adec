"""How far the tasks of runs are, for Prometheus: one kept row for each run whose attempt goes on."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dstackweb.progress.models import Scope
from dstackweb.progress.states import TaskState
from dstackweb.runs.models import Run


class Tasks(Collector):
    """The counters as they are; prefixes, which may be thousands, are left to the API."""

    def collect(self) -> Iterable[Metric]:
        """All metrics of tasks."""
        tasks = GaugeMetricFamily(
            "dstackweb_tasks", "Tasks of runs whose attempt goes on", labels=["project", "run", "state"]
        )
        groups = GaugeMetricFamily(
            "dstackweb_task_groups", "Groups of tasks that are not all forgotten", labels=["project", "run"]
        )
        scopes = list(Scope.objects.filter(run_id__gt=0, ended_ms=None).select_related("project").order_by("id"))
        names = dict(Run.objects.filter(pk__in=[scope.run_id for scope in scopes]).values_list("pk", "name"))
        newest = {(scope.project.name, names[scope.run_id]): scope for scope in scopes if scope.run_id in names}
        for labels, scope in newest.items():
            for state in TaskState:
                tasks.add_metric([*labels, state.value], getattr(scope, state.value))
            groups.add_metric(labels, scope.groups)
        yield tasks
        yield groups
        unsettled = GaugeMetricFamily(
            "dstackweb_task_attempts_unsettled", "Attempts that are over and whose live tasks are still to be released"
        )
        unsettled.add_metric([], Scope.objects.filter(ended_ms__isnull=False, settled=False).count())
        yield unsettled
