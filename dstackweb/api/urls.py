"""The URLs of the API under /api/v1, and of the probes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import URLPattern, URLResolver, path
from django.utils.translation import gettext as _
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import condition, require_safe
from ninja.responses import NinjaJSONEncoder

from dstackweb.api import (
    agents,
    artifacts,
    audit,
    history,
    hosts,
    monitoring,
    offers,
    progress,
    projects,
    queues,
    runner,
    runs,
    ssh_keys,
    sweeps,
    tasks,
    usage,
    utilization,
    views,
)
from dstackweb.api.app import api

for prefix, routers in {
    "/projects/{project}/runs": (
        runs.router,
        artifacts.router,
        utilization.of_runs,
        progress.of_runs,
        tasks.router,
    ),
    "/projects/{project}/sweeps": (sweeps.router,),
    "/projects/{project}/progress": (progress.router,),
    "/projects/{project}/utilization": (utilization.router,),
    "/projects/{project}/holds": (runs.hold_router,),
    "/projects/{project}/queues": (queues.router, history.of_queues),
    "/projects/{project}/views": (views.router,),
    "/projects/{project}/history": (history.router,),
    "/projects/{project}/usage": (usage.router,),
    "/projects/{project}/exports": (usage.export_router,),
    "/projects/{project}/audit": (audit.of_project,),
    "/projects/{project}/offers": (offers.router,),
    "/runner/jobs": (runner.router,),
    "/runner/hosts": (agents.of_hosts,),
    "/runner": (agents.of_instances,),
    "/hosts": (hosts.router,),
    "/audit": (audit.router,),
    "/usage": (usage.deployment_router,),
    "/backends": (offers.backend_router,),
    "": (projects.router, ssh_keys.router, tasks.downloads),
}.items():
    for router in routers:
        api.add_router(prefix, router)


def _in_form(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """The view with its 405 in the API's form."""

    @wraps(view)
    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        response = view(request, *args, **kwargs)
        if response.status_code != 405:
            return response
        detail = _("%(method)s is not allowed here; allowed: %(allow)s") % {
            "method": request.method,
            "allow": response["Allow"],
        }
        return JsonResponse({"detail": detail}, status=405, headers={"Allow": response["Allow"]})

    return answer


@cache
def _document() -> tuple[bytes, str]:
    """The OpenAPI document and its ETag; it takes half a second to make."""
    text = json.dumps(api.get_openapi_schema(), cls=NinjaJSONEncoder).encode()
    return text, f'"{hashlib.sha256(text).hexdigest()[:32]}"'


@require_safe
@condition(etag_func=lambda _request: _document()[1])
def openapi_json(_request: HttpRequest) -> HttpResponse:
    return HttpResponse(_document()[0], content_type="application/json")


def _api_urls() -> tuple[list[URLResolver | URLPattern], str, str]:
    patterns, app_name, namespace = api.urls
    for pattern in patterns:
        if isinstance(pattern, URLPattern) and pattern.callback is not None:
            if pattern.name == "openapi-json":
                pattern.callback = csrf_exempt(openapi_json)
            pattern.callback = _in_form(pattern.callback)
    return patterns, app_name, namespace


urlpatterns = [
    path("api/v1/", _api_urls()),
    path("healthz", csrf_exempt(monitoring.healthz)),
    path("readyz", csrf_exempt(monitoring.readyz)),
    path("metrics", csrf_exempt(monitoring.metrics)),
]
