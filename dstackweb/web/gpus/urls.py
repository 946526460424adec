"""The pages of GPUs; paths are relative to `/p/<project>/`."""

from django.urls import path

from dstackweb.web.gpus import run_views, utilization_views, views

urlpatterns = [
    path("gpus/", views.gpus_page, name="gpus"),
    path("gpus/<path:uuid>/", views.gpu_page, name="gpu"),
    path("runs/<str:run>/gpus/", run_views.run_gpus, name="run-gpus"),
    path("runs/<str:run>/keep/", run_views.keep, name="keep"),
    path("utilization/", utilization_views.utilization_page, name="utilization"),
    path("utilization/observe/", utilization_views.observe, name="utilization-observe"),
]
