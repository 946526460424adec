"""How pages of rows on the admin site show values that cannot be changed there."""

from __future__ import annotations

from django import template

from dstackweb.web.admin import codes

register = template.Library()
register.filter("admin_contents", codes.contents)
