"""The pages of operations; paths are relative to `/p/<project>/`."""

from django.urls import path

from dstackweb.web.ops import views

urlpatterns = [
    path("health/", views.health_page, name="health"),
]
