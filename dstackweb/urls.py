"""All URLs: the admin site, the API with its probes, and the web pages."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

admin.site.site_header = admin.site.site_title = "dstackweb administration"

handler500 = "dstackweb.web.common.views.server_error"
urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("dstackweb.api.urls")),
    path("", include("dstackweb.web.urls")),
]
