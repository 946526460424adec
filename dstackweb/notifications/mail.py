"""Mails, through Django's mailer as DSTACKWEB_EMAIL_URL sets it up."""

from __future__ import annotations

import contextlib
import smtplib
from uuid import UUID

from django.conf import settings
from django.core.mail import EmailMessage, get_connection

from dstackweb.runs.notification_codes import DeliveryProblem


def is_on() -> bool:
    return bool(settings.DSTACKWEB_EMAIL_URL)


def send(to: str, subject: str, text: str, batch: UUID) -> tuple[DeliveryProblem | None, bool]:
    """Send a mail with the id `batch`. Returns what went wrong, and whether to try again."""
    if not is_on():
        return DeliveryProblem.MAIL_OFF, False
    connection = get_connection()
    try:
        try:
            connection.open()
        except smtplib.SMTPAuthenticationError:
            return DeliveryProblem.MAIL_REFUSED, True
        except (OSError, smtplib.SMTPException):
            return DeliveryProblem.UNREACHABLE, True
        try:
            EmailMessage(subject, text, to=[to], headers=_headers(batch), connection=connection).send()
        except smtplib.SMTPResponseException as refused:
            return DeliveryProblem.MAIL_REFUSED, 400 <= refused.smtp_code < 500
        except smtplib.SMTPRecipientsRefused as refused:
            codes = [code for code, _text in refused.recipients.values()]
            return DeliveryProblem.MAIL_REFUSED, all(400 <= code < 500 for code in codes)
        except (OSError, smtplib.SMTPException):
            return DeliveryProblem.NO_ANSWER, False
    finally:
        with contextlib.suppress(OSError, smtplib.SMTPException):
            connection.close()
    return None, False


def _headers(batch: UUID) -> dict[str, str]:
    domain = settings.DEFAULT_FROM_EMAIL.rpartition("@")[2].rstrip(">") or "localhost"
    return {"Message-ID": f"<{batch}@{domain}>", "Auto-Submitted": "auto-generated"}
