"""The pages of cloud offers and instances; paths are relative to `/p/<project>/`."""

from django.urls import path
from django.views.generic import RedirectView

from dstackweb.web.cloud import instance_views, offer_views, quota_views

urlpatterns = [
    path("offers/", offer_views.offers_page, name="offers"),
    path("offers/refresh/", offer_views.refresh, name="offers-refresh"),
    path("offers/quotas/", quota_views.quotas_page, name="quotas"),
    path("offers/cache/", RedirectView.as_view(pattern_name="web:health")),
    path("machines/", instance_views.instances_page, name="machines"),
    path("machines/<uuid:machine>/stop/", instance_views.stop, name="machine-stop"),
]
