"""Mails about accounts in words."""

from __future__ import annotations

from typing import NamedTuple

from django.utils.translation import gettext as _

from dstackweb.wording import units


class Mail(NamedTuple):
    subject: str
    text: str


def password_mail(username: str, link: str, valid_s: float) -> Mail:
    """With the link that sets a new password."""
    text = _(
        "Set a new password for %(username)s:\n\n%(link)s\n\n"
        "The link works once, within %(time)s. If you did not ask for it, ignore this mail: your password is "
        "unchanged.\n"
    )
    values = {"username": username, "link": link, "time": units.duration(valid_s)}
    return Mail(_("New password for dstackweb"), text % values)
