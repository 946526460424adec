"""The mail with a link that sets a new password."""

from __future__ import annotations

from uuid import uuid4

from django.conf import settings
from django.contrib.auth.tokens import default_token_generator
from django.urls import reverse
from django.utils import translation
from django.utils.encoding import force_bytes
from django.utils.http import urlsafe_base64_encode

from dstackweb.accounts.models import User
from dstackweb.notifications import mail
from dstackweb.wording import notifications


def send(user_id: int, server: str, language: str) -> None:
    """Send the link to the user's address. `server` is the server's URL without a slash at its end.

    `language` is of the page that asked for it: it counts where the account has none.
    """
    user = User.objects.filter(pk=user_id, is_active=True).exclude(email="").first()
    if user is not None:
        with translation.override(user.language or language):
            words = notifications.password_mail(
                user.get_username(), server + path(user), settings.PASSWORD_RESET_TIMEOUT
            )
        mail.send(user.email, words.subject, words.text, uuid4())


def path(user: User) -> str:
    """The link's path. It works until the password changes, for PASSWORD_RESET_TIMEOUT seconds at most."""
    uid = urlsafe_base64_encode(force_bytes(user.pk))
    return reverse("password-new", args=[uid, default_token_generator.make_token(user)])
