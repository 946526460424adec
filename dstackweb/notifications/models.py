"""Channels, the rules that say what goes to them, and the notifications themselves.

A notification is written in the transaction of its event, once for each channel. It outlives the run that it names.
"""

from __future__ import annotations

import uuid
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy


class ChannelKind(models.TextChoices):
    APP = "app", gettext_lazy("In the app")
    """On this server's pages. Each user has one, made with the user (`services.bell_of`)."""
    EMAIL = "email", gettext_lazy("E-mail")
    """To the address of its user's account."""
    SLACK = "slack", gettext_lazy("Slack")
    TEAMS = "teams", gettext_lazy("Microsoft Teams")
    WEBHOOK = "webhook", gettext_lazy("Webhook")
    """A program: it gets each notification by itself, signed, and can recognize a repeated one by its id."""


GROUPED = frozenset({ChannelKind.EMAIL, ChannelKind.SLACK, ChannelKind.TEAMS})
"""For people: what is due together is one message, and what may have arrived is not sent again."""


class Channel(models.Model):
    """Where notifications go: a user's own, or a project's, which its managers set up."""

    user = models.ForeignKey("accounts.User", null=True, on_delete=models.CASCADE, related_name="notification_channels")
    project = models.ForeignKey(
        "accounts.Project", null=True, on_delete=models.CASCADE, related_name="notification_channels"
    )
    kind = models.CharField(max_length=10, choices=ChannelKind)
    name = models.CharField(max_length=60, blank=True)
    url = models.TextField(blank=True, editable=False, help_text="Encrypted, since it is the permission to post there")
    key = models.TextField(blank=True, editable=False, help_text="Of a webhook's signatures, encrypted")
    enabled = models.BooleanField(default=True)
    language = models.CharField(
        max_length=10, default="en", help_text="Of its messages: that of the page on which it was set up"
    )
    zone = models.CharField(max_length=60, default="UTC", help_text="Time zone of the times of day")
    quiet_from = models.TimeField(null=True)
    quiet_until = models.TimeField(null=True, help_text="Until then nothing is sent")
    digest_at = models.TimeField(null=True, help_text="All is sent once a day, at this time")
    failures = models.PositiveIntegerField(default=0, help_text="Messages in a row that were not delivered")
    held_until = models.DateTimeField(
        null=True,
        help_text="A worker sends its messages, or it is left alone after a failure, until then; past: its last turn",
    )

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
        return self.name or f"{self.kind} of {self.user or self.project}"


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


class Condition(models.Model):
    """Something that is so now (`outbox`): of an event and the number of a queue or backend."""

    event = models.CharField(max_length=40)
    subject = models.CharField(max_length=40)
    since = models.DateTimeField()
    notified = models.BooleanField(default=False, help_text="Its notifications have been written")
    away_since = models.DateTimeField(null=True, help_text="Not so any more, but perhaps soon again")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["event", "subject"], name="condition_once")]

    def __str__(self) -> str:
        return f"{self.event} {self.subject}"


class DeliveryStatus(models.TextChoices):
    WAITING = "waiting", gettext_lazy("waiting")
    """Until `due_at`."""
    SENDING = "sending", gettext_lazy("sending")
    SENT = "sent", gettext_lazy("sent")
    """Or in the app, where nothing is sent."""
    FAILED = "failed", gettext_lazy("failed")
    UNKNOWN = "unknown", gettext_lazy("may have arrived")
    """The connection, or the worker, was lost after it was sent and before there was an answer."""


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
    status = models.CharField(max_length=10, choices=DeliveryStatus, default=DeliveryStatus.SENT)
    due_at = models.DateTimeField(null=True, help_text="Not to be sent before")
    attempts = models.PositiveSmallIntegerField(default=0)
    batch = models.UUIDField(null=True, help_text="The message in which it was sent last")
    answer = models.PositiveSmallIntegerField(null=True, help_text="The receiver's HTTP status")
    problem = models.CharField(max_length=20, blank=True, help_text="runs.codes.DeliveryProblem")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["channel", "key"], name="delivery_once_in_channel")]
        indexes = [
            # Each page counts the first few unread ones of its reader.
            models.Index("channel", condition=Q(unread=True), name="delivery_unread"),
            models.Index(fields=["channel", "-id"], name="delivery_newest_first"),
            models.Index("at", name="delivery_by_age"),
            # What is to be sent is looked for every few seconds.
            models.Index("channel", "due_at", condition=Q(status__in=["waiting", "sending"]), name="delivery_to_send"),
        ]
        verbose_name_plural = "deliveries"

    def __str__(self) -> str:
        return f"{self.event} to {self.channel}"
