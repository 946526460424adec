"""Has Django's admin use this product's site, with which each room's `admin.py` registers its models.

They do so when the URLs are loaded (`dstackweb.urls`): only processes that serve pages import them.
"""

from __future__ import annotations

from django.contrib.admin.apps import SimpleAdminConfig


class AdminApp(SimpleAdminConfig):
    default_site = "dstackweb.web.admin.site.AdminSite"
