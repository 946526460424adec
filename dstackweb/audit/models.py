"""The audit log: who changed what, when and from where. Entries are only ever added, and deleted when they are old."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from django.db import models
from django.utils import timezone


class AuditKind(StrEnum):
    """What an entry is about."""

    USER = "user"
    PROJECT = "project"
    MEMBER = "member"
    INVITE = "invite"
    TOKEN = "token"  # noqa: S105 - what is recorded, no password
    SSH_KEY = "ssh_key"
    SIGN_IN_LINK = "sign_in_link"
    PASSWORD_LINK = "password_link"  # noqa: S105 - what is recorded, no password
    SECOND_STEP = "second_step"
    SIGN_ON = "sign_on"
    SECRET = "secret"  # noqa: S105 - what is recorded, no password
    QUEUE = "queue"
    PROFILE = "profile"
    POLICIES = "policies"
    BACKEND = "backend"
    HOST = "host"
    HOST_INVITE = "host_invite"
    CHANNEL = "channel"
    RUN = "run"
    VIEW = "view"


class AuditAction(StrEnum):
    CREATED = "created"
    CHANGED = "changed"
    DELETED = "deleted"
    SIGNED_IN = "signed_in"
    SIGNED_OUT = "signed_out"
    SIGN_IN_FAILED = "sign_in_failed"


class Entries(models.QuerySet["AuditEntry"]):
    """Entries as they were written."""

    def update(self, **_values: Any) -> int:
        raise TypeError("entries of the audit log don't change")


class AuditEntry(models.Model):
    """A change or a sign-in. Names and ids are copied, so that they outlive what they name.

    `changes` has each changed field with its old and new value, or null where the values are secret. `via` is the name
    of the API token that was used, if one was.
    """

    at = models.DateTimeField(default=timezone.now, db_index=True)
    actor_id = models.BigIntegerField(null=True)
    actor_name = models.CharField(max_length=150)
    via = models.CharField(max_length=80, blank=True)
    address = models.GenericIPAddressField(null=True)
    kind = models.CharField(max_length=20)
    action = models.CharField(max_length=20)
    name = models.CharField(max_length=200, help_text="Of what was changed")
    project_id = models.BigIntegerField(null=True)
    project_name = models.CharField(max_length=60, blank=True)
    changes: models.JSONField[Any, Any] = models.JSONField(default=dict)

    objects = Entries.as_manager()

    class Meta:
        verbose_name_plural = "audit entries"
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["project_id", "-id"], name="audit_project_newest_first"),
            models.Index(fields=["actor_name", "-id"], name="audit_actor_newest_first"),
        ]

    def __str__(self) -> str:
        return f"{self.name}, {self.at:%Y-%m-%d %H:%M} UTC"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.pk is not None:
            raise TypeError("entries of the audit log don't change")
        super().save(*args, **kwargs)
