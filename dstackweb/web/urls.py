"""The addresses of the pages. Everything of a project is under `/p/<project>/`."""

from __future__ import annotations

from django.urls import include, path

from dstackweb.web import (
    account_urls,
    cache_views,
    gpu_map_views,
    gpu_views,
    history_views,
    hold_views,
    host_actions,
    host_views,
    machine_views,
    move_views,
    offers_views,
    place_views,
    queue_settings_views,
    queue_views,
    quota_views,
    run_views,
    submit_views,
    utilization_views,
    why_views,
)
from dstackweb.web.home import favicon, home

pages = [
    path("queue/", queue_views.queue_page, name="queue"),
    path("queues/<str:queue>/", queue_views.queue_page, name="queue"),
    path("queues/", queue_settings_views.new_queue, name="new-queue"),
    path("queues/<str:queue>/settings/", queue_settings_views.settings_page, name="queue-settings"),
    path("queues/<str:queue>/pause/", queue_settings_views.set_paused, name="pause"),
    path("queues/<str:queue>/change/", move_views.change, name="change"),
    path("queues/<str:queue>/preview/", move_views.preview, name="preview"),
    path("queues/<str:queue>/undo/", move_views.undo, name="undo"),
    path("queues/<str:queue>/history/", history_views.queue_history, name="queue_history"),
    path("history/", history_views.project_history, name="history"),
    path("runs/", run_views.runs_page, name="runs"),
    path("runs/<str:run>/", run_views.run_page, name="run"),
    path("runs/<str:run>/log/", run_views.log, name="log"),
    path("runs/<str:run>/gpus/", gpu_views.run_gpus, name="run-gpus"),
    path("runs/<str:run>/keep/", gpu_views.keep, name="keep"),
    path("runs/<str:run>/stop/", run_views.stop, name="stop"),
    path("runs/<str:run>/why/", why_views.why_page, name="why"),
    path("runs/<str:run>/priority/", move_views.set_priority, name="priority"),
    path("runs/<str:run>/extend/", hold_views.extend, name="extend"),
    path("gpus/", gpu_map_views.gpus_page, name="gpus"),
    path("gpus/<path:uuid>/", gpu_map_views.gpu_page, name="gpu"),
    path("hold/", hold_views.hold_page, name="hold"),
    path("submit/", submit_views.submit_page, name="submit"),
    path("submit/plan/", submit_views.plan_page, name="plan"),
    path("hosts/", place_views.hosts_page, name="hosts"),
    path("hosts/invite/", host_actions.invite, name="host-invite"),
    path("hosts/invite/<int:invite_id>/withdraw/", host_actions.withdraw, name="host-invite-withdraw"),
    path("hosts/<str:host>/", host_views.host_page, name="host"),
    path("hosts/<str:host>/drain/", host_actions.drain, name="host-drain"),
    path("hosts/<str:host>/leave/", host_actions.leave, name="host-leave"),
    path("offers/", offers_views.offers_page, name="offers"),
    path("offers/refresh/", offers_views.refresh, name="offers-refresh"),
    path("offers/quotas/", quota_views.quotas_page, name="quotas"),
    path("offers/cache/", cache_views.cache_page, name="offers-cache"),
    path("machines/", machine_views.machines_page, name="machines"),
    path("machines/<uuid:machine>/stop/", machine_views.stop, name="machine-stop"),
    path("utilization/", utilization_views.utilization_page, name="utilization"),
    path("utilization/observe/", utilization_views.observe, name="utilization-observe"),
    path("profiles/", place_views.profiles_page, name="profiles"),
    path("health/", place_views.health_page, name="health"),
]

urlpatterns = [
    path("", home, name="home"),
    path("favicon.ico", favicon),
    path("p/<str:project>/", include((pages, "web"))),
    *account_urls.urlpatterns,
]
