"""Progress pages; paths are relative to `/p/<project>/`."""

from django.urls import path

from dstackweb.web.progress import cards, views

urlpatterns = [
    path("progress/", views.progress_page, name="progress"),
    path("progress/wall/", views.progress_page, {"wall": True}, name="progress-wall"),
    path("progress/inside/", cards.inside, name="progress-inside"),
    path("progress/prefix/", views.prefix_page, name="progress-prefix"),
    path("runs/<str:run>/progress/", views.progress_page, name="run-progress"),
    path("runs/<str:run>/progress/wall/", views.progress_page, {"wall": True}, name="run-progress-wall"),
    path("runs/<str:run>/progress/card/", cards.card, name="run-progress-card"),
    path("runs/<str:run>/progress/prefix/", views.prefix_page, name="run-progress-prefix"),
    path("runs/<str:run>/progress/group/", views.group_page, name="run-progress-group"),
]
