"""Has Django's admin use this product's site, with which each room's `admin.py` registers its models."""

from __future__ import annotations

from django.contrib.admin.apps import AdminConfig


class AdminApp(AdminConfig):
    default_site = "dstackweb.web.admin.site.AdminSite"
