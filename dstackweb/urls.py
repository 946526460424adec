"""All URLs: the admin site, the API with its probes, and the web pages."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.decorators import login_required
from django.urls import include, path
from django.views.generic import RedirectView

from dstackweb.lib.admin import translate_names
from dstackweb.web.accounts.views import to_sign_in

handler400 = "dstackweb.web.common.views.bad_request"
handler403 = "dstackweb.web.common.views.denied"
handler404 = "dstackweb.web.common.views.not_found"
handler500 = "dstackweb.web.common.views.server_error"
admin.autodiscover()
translate_names()
urlpatterns = [
    path("admin/login/", to_sign_in),
    path("admin/password_change/", login_required(RedirectView.as_view(pattern_name="password-change"))),
    path("admin/", admin.site.urls),
    path("", include("dstackweb.api.urls")),
    path("", include("dstackweb.web.urls")),
]
