"""The pages of hosts; paths are relative to `/p/<project>/`."""

from django.urls import path

from dstackweb.web.hosts import action_views, views

urlpatterns = [
    path("hosts/", views.hosts_page, name="hosts"),
    path("hosts/invite/", action_views.invite, name="host-invite"),
    path("hosts/invite/<int:invite_id>/withdraw/", action_views.withdraw, name="host-invite-withdraw"),
    path("hosts/<str:host>/", views.host_page, name="host"),
    path("hosts/<str:host>/drain/", action_views.drain, name="host-drain"),
    path("hosts/<str:host>/leave/", action_views.leave, name="host-leave"),
]
