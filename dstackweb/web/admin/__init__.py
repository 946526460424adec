"""The admin site as part of the product: its shell, its areas, and how its lists and forms show things."""

from django.contrib.admin.apps import SimpleAdminConfig


class AdminApp(SimpleAdminConfig):
    """Has each room's `admin.py` register its models with this product's site.

    They do so when the URLs are loaded (`dstackweb.urls`): only processes that serve pages import them.
    """

    default_site = "dstackweb.web.admin.site.AdminSite"
