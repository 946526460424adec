"""Where the API lives: everything under /api/v1, and the probes."""

from __future__ import annotations

from django.http import HttpRequest, JsonResponse
from django.urls import path

from dstackweb.api import decisions, deployment, history, holds, hosts, moves, ops, queues, runner, runs
from dstackweb.api.app import api

api.add_router("/projects/{project}/runs", runs.router)
api.add_router("/projects/{project}/runs", holds.of_runs)
api.add_router("/projects/{project}/runs", decisions.router)
api.add_router("/projects/{project}/holds", holds.router)
api.add_router("/projects/{project}/queues", queues.router)
api.add_router("/projects/{project}/queues", history.of_queues)
api.add_router("/projects/{project}/history", history.router)
api.add_router("/projects/{project}/queues", moves.router)
api.add_router("/runner/jobs", runner.router)
api.add_router("/hosts", hosts.router)
api.add_router("", deployment.router)


def not_found(request: HttpRequest, rest: str) -> JsonResponse:
    """Whoever speaks to the API is answered in its form, also where it has nothing."""
    return JsonResponse({"detail": f"the API has nothing at /api/v1/{rest}; see /api/v1/openapi.json"}, status=404)


urlpatterns = [
    path("api/v1/", api.urls),
    path("api/v1/<path:rest>", not_found),
    path("healthz", ops.healthz),
    path("readyz", ops.readyz),
    path("metrics", ops.metrics),
]
