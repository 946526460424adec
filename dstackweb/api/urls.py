"""The URLs of the API under /api/v1, and of the probes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import URLPattern, URLResolver, path

from dstackweb.api import (
    agents,
    backends,
    decisions,
    history,
    holds,
    hosts,
    metrics,
    monitoring,
    moves,
    offers,
    progress,
    projects,
    queues,
    runner,
    runs,
    tasks,
    utilization,
)
from dstackweb.api.app import api

api.add_router("/projects/{project}/runs", runs.router)
api.add_router("/projects/{project}/runs", holds.of_runs)
api.add_router("/projects/{project}/runs", decisions.router)
api.add_router("/projects/{project}/runs", utilization.of_runs)
api.add_router("/projects/{project}/runs", metrics.router)
api.add_router("/projects/{project}/runs", progress.of_runs)
api.add_router("/projects/{project}/runs", tasks.router)
api.add_router("/projects/{project}/progress", progress.router)
api.add_router("/projects/{project}/utilization", utilization.router)
api.add_router("/projects/{project}/holds", holds.router)
api.add_router("/projects/{project}/queues", queues.router)
api.add_router("/projects/{project}/queues", history.of_queues)
api.add_router("/projects/{project}/history", history.router)
api.add_router("/projects/{project}/queues", moves.router)
api.add_router("/runner/jobs", runner.router)
api.add_router("/runner", agents.router)
api.add_router("/hosts", hosts.router)
api.add_router("/projects/{project}/offers", offers.router)
api.add_router("/backends", backends.router)
api.add_router("", projects.router)
api.add_router("", tasks.downloads)


def not_found(request: HttpRequest, rest: str) -> JsonResponse:
    """A 404 in the API's form."""
    return JsonResponse({"detail": f"/api/v1/{rest} does not exist; see /api/v1/openapi.json"}, status=404)


def _in_form(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """The view with its 405 in the API's form."""

    @wraps(view)
    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        response = view(request, *args, **kwargs)
        if response.status_code != 405:
            return response
        detail = f"{request.method} is not allowed here; allowed: {response['Allow']}"
        return JsonResponse({"detail": detail}, status=405, headers={"Allow": response["Allow"]})

    return answer


def _api_urls() -> tuple[list[URLResolver | URLPattern], str, str]:
    patterns, app_name, namespace = api.urls
    for pattern in patterns:
        if isinstance(pattern, URLPattern) and pattern.callback is not None:
            pattern.callback = _in_form(pattern.callback)
    return patterns, app_name, namespace


urlpatterns = [
    path("api/v1/", _api_urls()),
    path("api/v1/<path:rest>", not_found),
    path("healthz", monitoring.healthz),
    path("readyz", monitoring.readyz),
    path("metrics", monitoring.metrics),
]
