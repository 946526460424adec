"""All addresses: the admin, the API under /api/v1/, and the pages."""

from __future__ import annotations

from importlib.util import find_spec

from django.contrib import admin
from django.urls import URLPattern, URLResolver, include, path

urlpatterns: list[URLPattern | URLResolver] = [path("admin/", admin.site.urls)]
if find_spec("dstackweb.api.urls"):
    urlpatterns.append(path("api/v1/", include("dstackweb.api.urls")))
if find_spec("dstackweb.web.urls"):
    urlpatterns.append(path("", include("dstackweb.web.urls")))
