"""Where the API lives: everything under /api/v1, and the probes."""

from __future__ import annotations

from django.urls import path

from dstackweb.api import deployment, ops, queues, runner, runs
from dstackweb.api.app import api

api.add_router("/projects/{project}/runs", runs.router)
api.add_router("/projects/{project}/queues", queues.router)
api.add_router("/runner/jobs", runner.router)
api.add_router("", deployment.router)

urlpatterns = [
    path("api/v1/", api.urls),
    path("healthz", ops.healthz),
    path("readyz", ops.readyz),
    path("metrics", ops.metrics),
]
