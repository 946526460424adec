"""The pages of runs; paths are relative to `/p/<project>/`."""

from django.urls import path

from dstackweb.web.runs import hold_views, profile_views, submit_views, views, why_views

urlpatterns = [
    path("runs/", views.runs_page, name="runs"),
    path("runs/<str:run>/", views.run_page, name="run"),
    path("runs/<str:run>/log/", views.log, name="log"),
    path("runs/<str:run>/stop/", views.stop, name="stop"),
    path("runs/<str:run>/why/", why_views.why_page, name="why"),
    path("runs/<str:run>/extend/", hold_views.extend, name="extend"),
    path("hold/", hold_views.hold_page, name="hold"),
    path("submit/", submit_views.submit_page, name="submit"),
    path("submit/plan/", submit_views.plan_page, name="plan"),
    path("profiles/", profile_views.profiles_page, name="profiles"),
]
