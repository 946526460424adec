"""The pages of the queue; paths are relative to `/p/<project>/`."""

from django.urls import path

from dstackweb.web.queue import move_views, settings_views, views

urlpatterns = [
    path("queue/", views.queue_page, name="queue"),
    path("queues/<str:queue>/", views.queue_page, name="queue"),
    path("queues/", settings_views.new_queue, name="new-queue"),
    path("queues/<str:queue>/settings/", settings_views.settings_page, name="queue-settings"),
    path("queues/<str:queue>/pause/", settings_views.set_paused, name="pause"),
    path("queues/<str:queue>/change/", move_views.change, name="change"),
    path("queues/<str:queue>/preview/", move_views.preview, name="preview"),
    path("queues/<str:queue>/undo/", move_views.undo, name="undo"),
    path("runs/<str:run>/priority/", move_views.set_priority, name="priority"),
]
