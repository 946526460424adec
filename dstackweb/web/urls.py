"""The addresses of the pages: each room lists its own. A project's pages are under `/p/<project>/`."""

from __future__ import annotations

from django.urls import include, path

from dstackweb.web.common.views import favicon, home

project_pages = [
    path("", include("dstackweb.web.queue.urls")),
    path("", include("dstackweb.web.history.urls")),
    path("", include("dstackweb.web.runs.urls")),
    path("", include("dstackweb.web.gpus.urls")),
    path("", include("dstackweb.web.progress.urls")),
    path("", include("dstackweb.web.hosts.urls")),
    path("", include("dstackweb.web.cloud.urls")),
    path("", include("dstackweb.web.ops.urls")),
]

urlpatterns = [
    path("", home, name="home"),
    path("favicon.ico", favicon),
    path("p/<str:project>/", include((project_pages, "web"))),
    path("", include("dstackweb.web.accounts.urls")),
]
