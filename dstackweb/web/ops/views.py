"""The health page."""

from __future__ import annotations

import hashlib

from django.http import HttpResponse
from django.utils import timezone

from dstackweb.offers import figures
from dstackweb.runs import selectors
from dstackweb.web.common.pages import PageRequest, polled, project_page
from dstackweb.web.ops import health


@project_page()
def health_page(request: PageRequest) -> HttpResponse:
    """The checks; also what polls of it get."""
    checks = health.checks()
    calls = sorted(figures.last_day(timezone.now()).items())
    version = hashlib.sha256(repr((checks, calls)).encode()).hexdigest()[:16]
    return polled(
        request,
        "ops/health.html",
        "ops/health_list.html",
        version,
        lambda: {
            "checks": checks,
            "calls": calls,
            "worst": health.worst(checks),
            "waiting": selectors.counts(request.project)["submitted"],
        },
    )
