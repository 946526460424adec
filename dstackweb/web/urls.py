"""The addresses of the pages. Everything of a project is under `/p/<project>/`."""

from __future__ import annotations

from django.urls import include, path

from dstackweb.web.accounts import urls as account_urls
from dstackweb.web.cloud import cache_views, instance_views, offer_views, quota_views
from dstackweb.web.common.home import favicon, home
from dstackweb.web.gpus import run_views as gpu_views
from dstackweb.web.gpus import utilization_views
from dstackweb.web.gpus import views as gpu_map_views
from dstackweb.web.history import views as history_views
from dstackweb.web.hosts import action_views, list_views
from dstackweb.web.hosts import views as host_views
from dstackweb.web.progress import cards, prefix_views
from dstackweb.web.progress import views as progress_views
from dstackweb.web.queue import move_views
from dstackweb.web.queue import settings_views as queue_settings_views
from dstackweb.web.queue import views as queue_views
from dstackweb.web.runs import hold_views, submit_views, why_views
from dstackweb.web.runs import views as run_views

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
    path("runs/<str:run>/progress/", progress_views.progress_page, name="run-progress"),
    path("runs/<str:run>/progress/wall/", progress_views.progress_page, {"wall": True}, name="run-progress-wall"),
    path("runs/<str:run>/progress/card/", cards.card, name="run-progress-card"),
    path("runs/<str:run>/progress/prefix/", prefix_views.prefix_page, name="run-progress-prefix"),
    path("runs/<str:run>/progress/group/", prefix_views.group_page, name="run-progress-group"),
    path("runs/<str:run>/keep/", gpu_views.keep, name="keep"),
    path("runs/<str:run>/stop/", run_views.stop, name="stop"),
    path("runs/<str:run>/why/", why_views.why_page, name="why"),
    path("runs/<str:run>/priority/", move_views.set_priority, name="priority"),
    path("runs/<str:run>/extend/", hold_views.extend, name="extend"),
    path("progress/", progress_views.progress_page, name="progress"),
    path("progress/wall/", progress_views.progress_page, {"wall": True}, name="progress-wall"),
    path("progress/inside/", cards.inside, name="progress-inside"),
    path("progress/prefix/", prefix_views.prefix_page, name="progress-prefix"),
    path("gpus/", gpu_map_views.gpus_page, name="gpus"),
    path("gpus/<path:uuid>/", gpu_map_views.gpu_page, name="gpu"),
    path("hold/", hold_views.hold_page, name="hold"),
    path("submit/", submit_views.submit_page, name="submit"),
    path("submit/plan/", submit_views.plan_page, name="plan"),
    path("hosts/", list_views.hosts_page, name="hosts"),
    path("hosts/invite/", action_views.invite, name="host-invite"),
    path("hosts/invite/<int:invite_id>/withdraw/", action_views.withdraw, name="host-invite-withdraw"),
    path("hosts/<str:host>/", host_views.host_page, name="host"),
    path("hosts/<str:host>/drain/", action_views.drain, name="host-drain"),
    path("hosts/<str:host>/leave/", action_views.leave, name="host-leave"),
    path("offers/", offer_views.offers_page, name="offers"),
    path("offers/refresh/", offer_views.refresh, name="offers-refresh"),
    path("offers/quotas/", quota_views.quotas_page, name="quotas"),
    path("offers/cache/", cache_views.cache_page, name="offers-cache"),
    path("machines/", instance_views.machines_page, name="machines"),
    path("machines/<uuid:machine>/stop/", instance_views.stop, name="machine-stop"),
    path("utilization/", utilization_views.utilization_page, name="utilization"),
    path("utilization/observe/", utilization_views.observe, name="utilization-observe"),
    path("profiles/", list_views.profiles_page, name="profiles"),
    path("health/", list_views.health_page, name="health"),
]

urlpatterns = [
    path("", home, name="home"),
    path("favicon.ico", favicon),
    path("p/<str:project>/", include((pages, "web"))),
    *account_urls.urlpatterns,
]
