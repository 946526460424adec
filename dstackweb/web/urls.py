"""The addresses of the pages. A project's pages are under `/p/<project>/`."""

from __future__ import annotations

from allauth.mfa.base import views as mfa
from allauth.mfa.recovery_codes import views as recovery
from allauth.mfa.totp import views as totp
from allauth.mfa.webauthn import views as passkeys
from django.contrib.auth.views import LogoutView
from django.urls import include, path
from django.views.generic import RedirectView

from dstackweb.web import audit, health, history, hosts, notifications, usage
from dstackweb.web.accounts import account_views, second_step
from dstackweb.web.accounts import views as accounts
from dstackweb.web.cloud import instance_views, offer_views
from dstackweb.web.common import views
from dstackweb.web.common import views as common
from dstackweb.web.gpus import run_panel, utilization_views
from dstackweb.web.gpus import views as gpus
from dstackweb.web.progress import scope
from dstackweb.web.progress import views as progress
from dstackweb.web.queue import move_views, past_views, settings_views, transfer_views
from dstackweb.web.queue import views as queue
from dstackweb.web.runs import compare_views, interactive_views, output_views, submit_views, sweep_views, why_views
from dstackweb.web.runs import views as runs

project_pages = [
    path("", common.project_home, name="project"),
    path("queue/", queue.queue_page, name="queue"),
    path("queues/<str:queue>/", queue.queue_page, name="queue"),
    path("queues/", settings_views.queues_page, name="new-queue"),
    path("queues/<str:queue>/at/", past_views.past_page, name="past"),
    path("queues/<str:queue>/settings/", settings_views.settings_page, name="queue-settings"),
    path("queues/<str:queue>/pause/", settings_views.set_paused, name="pause"),
    path("queues/<str:queue>/change/", move_views.change, name="change"),
    path("queues/<str:queue>/preview/", move_views.preview, name="preview"),
    path("queues/<str:queue>/undo/", move_views.undo, name="undo"),
    path("queues/<str:queue>/transfer/", transfer_views.transfer_page, name="transfer"),
    path("queues/<str:queue>/views/", settings_views.save_view, name="view-save"),
    path("queues/<str:queue>/views/<int:view>/delete/", settings_views.delete_view, name="view-delete"),
    path("queues/<str:queue>/views/<int:view>/default/", settings_views.make_default_view, name="view-default"),
    path("runs/<str:run>/priority/", move_views.set_priority, name="priority"),
    path("history/", history.project_history, name="history"),
    path("queues/<str:queue>/history/", history.queue_history, name="queue-history"),
    path("history/history.<str:form>", history.export, name="history-export"),
    path("queues/<str:queue>/queue.<str:form>", queue.export, name="queue-export"),
    path("usage/", usage.usage_page, name="usage"),
    path("usage/usage.<str:form>", usage.export, name="usage-export"),
    path("runs/", runs.runs_page, name="runs"),
    path("runs/runs.<str:form>", runs.export, name="runs-export"),
    path("sweeps/", sweep_views.sweeps_page, name="sweeps"),
    path("sweeps/<str:sweep>/", sweep_views.sweep_page, name="sweep"),
    path("sweeps/<str:sweep>/sweep.<str:form>", sweep_views.export, name="sweep-export"),
    path("sweeps/<str:sweep>/stop/", sweep_views.stop, name="sweep-stop"),
    path("sweeps/<str:sweep>/release/", sweep_views.release, name="sweep-release"),
    path("sweeps/<str:sweep>/retry/", sweep_views.retry, name="sweep-retry"),
    path("sweeps/<str:sweep>/priority/", sweep_views.set_priority, name="sweep-priority"),
    path("compare/", compare_views.compare_page, name="compare"),
    path("runs/<str:run>/", runs.run_page, name="run"),
    path("runs/<str:run>/log/", output_views.log, name="log"),
    path("runs/<str:run>/log/lines/", output_views.lines, name="log-lines"),
    path("runs/<str:run>/log/search/", output_views.search, name="log-search"),
    path("runs/<str:run>/log/marks/", output_views.marks, name="log-marks"),
    path("runs/<str:run>/artifacts/", output_views.artifact_page, name="artifact"),
    path("runs/<str:run>/artifacts/file/", output_views.artifact_file, name="artifact-file"),
    path("runs/<str:run>/stop/", runs.stop, name="stop"),
    path("runs/<str:run>/release/", runs.release, name="release"),
    path("runs/<str:run>/delete/", runs.delete, name="run-delete"),
    path("runs/<str:run>/why/", why_views.why_page, name="why"),
    path("runs/<str:run>/open/", interactive_views.open_page, name="open"),
    path("runs/<str:run>/extend/", interactive_views.extend, name="extend"),
    path("hold/", interactive_views.hold_page, name="hold"),
    path("submit/", submit_views.submit_page, name="submit"),
    path("submit/plan/", submit_views.plan_page, name="plan"),
    path("profiles/", runs.profiles_page, name="profiles"),
    path("gpus/", gpus.gpus_page, name="gpus"),
    path("gpus/<path:uuid>/", gpus.gpu_page, name="gpu"),
    path("runs/<str:run>/gpus/", run_panel.run_gpus, name="run-gpus"),
    path("runs/<str:run>/keep/", run_panel.keep, name="keep"),
    path("utilization/", utilization_views.utilization_page, name="utilization"),
    path("utilization/observe/", utilization_views.observe, name="utilization-observe"),
    path("progress/", progress.progress_page, name="progress"),
    path("progress/wall/", progress.progress_page, {"wall": True}, name="progress-wall"),
    path("progress/inside/", scope.running_runs, name="progress-running"),
    path("progress/prefix/", progress.prefix_page, name="progress-prefix"),
    path("runs/<str:run>/progress/", progress.progress_page, name="run-progress"),
    path("runs/<str:run>/progress/wall/", progress.progress_page, {"wall": True}, name="run-progress-wall"),
    path("runs/<str:run>/progress/card/", scope.card, name="run-progress-card"),
    path("runs/<str:run>/progress/prefix/", progress.prefix_page, name="run-progress-prefix"),
    path("runs/<str:run>/progress/group/", progress.group_page, name="run-progress-group"),
    path("hosts/", hosts.hosts_page, name="hosts"),
    path("hosts/invite/", hosts.invite, name="host-invite"),
    path("hosts/invite/<int:invite_id>/withdraw/", hosts.withdraw, name="host-invite-withdraw"),
    path("hosts/<str:host>/", hosts.host_page, name="host"),
    path("hosts/<str:host>/drain/", hosts.drain, name="host-drain"),
    path("hosts/<str:host>/leave/", hosts.leave, name="host-leave"),
    path("hosts/<str:host>/clear/", hosts.clear, name="host-clear"),
    path("hosts/<str:host>/revoke/", hosts.revoke, name="host-revoke"),
    path("hosts/<str:host>/gone/", hosts.gone, name="host-gone"),
    path("offers/", offer_views.offers_page, name="offers"),
    path("offers/refresh/", offer_views.refresh, name="offers-refresh"),
    path("offers/quotas/", offer_views.quotas_page, name="quotas"),
    path("offers/cache/", RedirectView.as_view(pattern_name="web:health")),
    path("machines/", instance_views.instances_page, name="instances"),
    path("machines/<uuid:instance>/stop/", instance_views.stop, name="instance-stop"),
    path("audit/", audit.audit_page, name="audit"),
    path("audit/audit.<str:form>", audit.export, name="audit-export"),
    path("health/", health.health_page, name="health"),
    path("palette/", views.palette, name="palette"),
    path("palette/runs/", views.palette_runs, name="palette-runs"),
]

account_pages = [
    path("login/", accounts.SignIn.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("login/", accounts.SignIn.as_view(), name="account_login"),
    path("login/passkey/", second_step.PasskeySignIn.as_view(), name="mfa_login_webauthn"),
    path("login/code/", mfa.authenticate, name="mfa_authenticate"),
    path("login/sso/", account_views.single_sign_on, name="single-sign-on"),
    path(
        "login/sso/callback/",
        account_views.single_sign_on_answer,
        {"provider_id": account_views.PROVIDER},
        name="openid_connect_callback",
    ),
    path("login/sso/cancelled/", RedirectView.as_view(pattern_name="login"), name="socialaccount_login_cancelled"),
    path("login/<str:token>/", accounts.login_link, name="login-link"),
    path("password/forgot/", account_views.password_forgot, name="password-forgot"),
    path("password/<str:uidb64>/<str:token>/", account_views.NewPassword.as_view(), name="password-new"),
    path("invite/<str:token>/", accounts.invite_accept, name="invite-accept"),
    path("p/<str:project>/members/", accounts.members, name="members"),
    path("p/<str:project>/members/invite/", accounts.invite_create, name="invite-create"),
    path("p/<str:project>/members/invites/<int:invite_id>/withdraw/", accounts.invite_withdraw, name="invite-withdraw"),
    path("p/<str:project>/members/<int:user_id>/role/", accounts.member_role, name="member-role"),
    path("p/<str:project>/members/<int:user_id>/remove/", accounts.member_remove, name="member-remove"),
    path("p/<str:project>/members/<int:user_id>/password-link/", accounts.password_link, name="password-link"),
    path("p/<str:project>/secrets/", accounts.secrets, name="secrets"),
    path("p/<str:project>/secrets/set/", accounts.secret_set, name="secret-set"),
    path("p/<str:project>/secrets/<str:name>/delete/", accounts.secret_delete, name="secret-delete"),
    path("account/", account_views.account, name="account"),
    path("language/", account_views.choose_language, name="language"),
    path("account/sso/disconnect/", account_views.disconnect, name="single-sign-on-disconnect"),
    path("account/confirm/", second_step.ConfirmPassword.as_view(), name="account_reauthenticate"),
    path("account/confirm/code/", mfa.reauthenticate, name="mfa_reauthenticate"),
    path("account/confirm/passkey/", passkeys.reauthenticate_webauthn, name="mfa_reauthenticate_webauthn"),
    path("account/two-step/", second_step.two_step, name="mfa_index"),
    path("account/two-step/", second_step.two_step, name="mfa_list_webauthn"),
    path("account/two-step/app/", totp.activate_totp, name="mfa_activate_totp"),
    path("account/two-step/app/remove/", totp.deactivate_totp, name="mfa_deactivate_totp"),
    path("account/two-step/codes/", recovery.view_recovery_codes, name="mfa_view_recovery_codes"),
    path("account/two-step/codes/new/", recovery.generate_recovery_codes, name="mfa_generate_recovery_codes"),
    path("account/two-step/passkeys/add/", passkeys.add_webauthn, name="mfa_add_webauthn"),
    path("account/two-step/passkeys/<int:pk>/remove/", second_step.RemovePasskey.as_view(), name="mfa_remove_webauthn"),
    path("account/ssh-keys/", account_views.keys, name="ssh-keys"),
    path("account/ssh-keys/<int:key_id>/remove/", account_views.remove, name="ssh-key-remove"),
    path("account/tokens/", accounts.tokens, name="tokens"),
    path("account/tokens/create/", accounts.token_create, name="token-create"),
    path("account/tokens/<int:token_id>/revoke/", accounts.token_revoke, name="token-revoke"),
    path("account/sessions/", accounts.sessions_page, name="sessions"),
    path("account/sessions/others/end/", accounts.sessions_end_others, name="sessions-end-others"),
    path("account/sessions/<str:handle>/end/", accounts.session_end, name="session-end"),
    path("account/notifications/", notifications.inbox_page, name="notifications"),
    path("account/notifications/read/", notifications.read_all, name="notifications-read"),
    path("account/notifications/<uuid:uid>/open/", notifications.open_one, name="notification-open"),
    path("account/notifications/settings/", notifications.settings_page, name="notification-settings"),
    path("account/notifications/add/", notifications.add_own, name="channel-add"),
    path("account/notifications/channels/<int:channel_id>/", notifications.channel_page, name="channel"),
    path("account/notifications/channels/<int:channel_id>/hours/", notifications.channel_hours, name="channel-hours"),
    path("account/notifications/channels/<int:channel_id>/test/", notifications.test_channel, name="channel-test"),
    path("account/notifications/channels/<int:channel_id>/key/", notifications.new_channel_key, name="channel-key"),
    path("account/notifications/channels/<int:channel_id>/turn/", notifications.turn_channel, name="channel-turn"),
    path(
        "account/notifications/channels/<int:channel_id>/delete/", notifications.delete_channel, name="channel-delete"
    ),
    path("account/notifications/<uuid:uid>/again/", notifications.send_again, name="notification-again"),
    path("p/<str:project>/notifications/", notifications.project_channels, name="project-notifications"),
    path("p/<str:project>/notifications/add/", notifications.add_for_project, name="project-channel-add"),
    path("account/password/", accounts.ChangePassword.as_view(), name="password-change"),
]

urlpatterns = [
    path("", common.home, name="home"),
    path("health/", common.health, name="health"),
    path("favicon.ico", common.favicon),
    path("p/<str:project>/", include((project_pages, "web"))),
    *account_pages,
]
