"""The commands that texts tell the person who runs this server to type."""

from __future__ import annotations

from django.conf import settings

_OF_MAKE = {"up": "make run", "login_link": "make login"}


def server_command(name: str) -> str:
    """`dstackweb-server NAME`, or what a checkout has for it, where that program is not on the path."""
    if settings.IS_CHECKOUT:
        return _OF_MAKE.get(name, f".venv/bin/dstackweb-server {name}")
    return f"dstackweb-server {name}"
