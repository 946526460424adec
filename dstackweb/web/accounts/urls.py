"""The addresses of the account pages."""

from __future__ import annotations

from django.contrib.auth.views import LogoutView
from django.urls import path

from dstackweb.web.accounts import views

urlpatterns = [
    path("login/", views.SignIn.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("login/<str:token>/", views.login_link, name="login-link"),
    path("invite/<str:token>/", views.invite_accept, name="invite-accept"),
    path("p/<str:project>/members/", views.members, name="members"),
    path("p/<str:project>/members/invite/", views.invite_create, name="invite-create"),
    path("p/<str:project>/members/invites/<int:invite_id>/withdraw/", views.invite_withdraw, name="invite-withdraw"),
    path("p/<str:project>/members/<int:user_id>/role/", views.member_role, name="member-role"),
    path("p/<str:project>/members/<int:user_id>/remove/", views.member_remove, name="member-remove"),
    path("p/<str:project>/secrets/", views.secrets, name="secrets"),
    path("p/<str:project>/secrets/set/", views.secret_set, name="secret-set"),
    path("p/<str:project>/secrets/<str:name>/delete/", views.secret_delete, name="secret-delete"),
    path("account/tokens/", views.tokens, name="tokens"),
    path("account/tokens/create/", views.token_create, name="token-create"),
    path("account/tokens/<int:token_id>/revoke/", views.token_revoke, name="token-revoke"),
    path("account/password/", views.ChangePassword.as_view(), name="password-change"),
]
