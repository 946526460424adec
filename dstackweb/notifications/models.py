"""Channels, the rules that say what goes to them, and the notifications that have.

A notification is written in the transaction of its event, once for each channel. It outlives the run that it names.
"""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils import timezone


class ChannelKind(StrEnum):
    """How a channel's notifications reach people."""

    APP = "app"
    """On this server's pages. Each user has one, made with the user (`services.bell_of`)."""


class Channel(models.Model):
    """Where notifications go: a user's own, or a project's, which its managers set up."""

    user = models.ForeignKey("accounts.User", null=True, on_delete=models.CASCADE, related_name="notification_channels")
    project = models.ForeignKey(
        "accounts.Project", null=True, on_delete=models.CASCADE, related_name="notification_channels"
    )
    kind = models.CharField(max_length=10)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user"], condition=Q(kind="app"), name="one_app_channel_of_user"),
            models.CheckConstraint(
                condition=Q(user=None, project__isnull=False) | Q(user__isnull=False, project=None),
                name="channel_of_user_or_project",
            ),
        ]
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.kind} of {self.user or self.project}"


class Rule(models.Model):
    """An event that goes to a channel (`runs.codes.NotificationEvent`): of all projects that it may see, or of one.

    `own`: only of the runs of the channel's user.
    """

    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="rules")
    event = models.CharField(max_length=40)
    project = models.ForeignKey("accounts.Project", null=True, on_delete=models.CASCADE, related_name="+")
    own = models.BooleanField(default=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["channel", "event"], name="rule_once_in_channel")]
        indexes = [models.Index(fields=["event", "own"], name="rule_by_event")]

    def __str__(self) -> str:
        return f"{self.event} to {self.channel}"


class Delivery(models.Model):
    """A notification of a channel. `key` names its event, so that it is there once, whatever is repeated."""

    uid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="deliveries")
    key = models.CharField(max_length=200)
    event = models.CharField(max_length=40)
    project = models.ForeignKey("accounts.Project", null=True, on_delete=models.CASCADE, related_name="+")
    run_uid = models.UUIDField(null=True, help_text="The run may have been removed since")
    data: models.JSONField[Any, Any] = models.JSONField(default=dict, help_text="See wording.notifications")
    at = models.DateTimeField(default=timezone.now, help_text="When the event happened")
    unread = models.BooleanField(default=False, help_text="In the app, until its reader has opened it")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["channel", "key"], name="delivery_once_in_channel")]
        indexes = [
            # Each page counts the first few unread ones of its reader.
            models.Index("channel", condition=Q(unread=True), name="delivery_unread"),
            models.Index(fields=["channel", "-id"], name="delivery_newest_first"),
            models.Index("at", name="delivery_by_age"),
        ]
        verbose_name_plural = "deliveries"

    def __str__(self) -> str:
        return f"{self.event} to {self.channel}"
