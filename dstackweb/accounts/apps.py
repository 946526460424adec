"""The accounts app: users, projects and roles."""

from __future__ import annotations

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "dstackweb.accounts"
    label = "accounts"
