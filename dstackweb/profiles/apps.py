"""The profiles app: defaults for runs."""

from __future__ import annotations

from django.apps import AppConfig


class ProfilesConfig(AppConfig):
    name = "dstackweb.profiles"
    label = "profiles"
