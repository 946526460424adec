"""The pages of history; paths are relative to `/p/<project>/`."""

from django.urls import path

from dstackweb.web.history import views

urlpatterns = [
    path("history/", views.project_history, name="history"),
    path("queues/<str:queue>/history/", views.queue_history, name="queue_history"),
]
