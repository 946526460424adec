from django.apps import AppConfig


class NotificationsConfig(AppConfig):
    name = "dstackweb.notifications"

    def ready(self) -> None:
        """Listen to events, in their transactions."""
        from django.db.models.signals import post_save
        from django.utils import timezone

        from dstackweb.accounts.models import User
        from dstackweb.audit import recorder
        from dstackweb.audit.models import AuditKind
        from dstackweb.audit.recorder import Watched
        from dstackweb.backends.models import HostEvent
        from dstackweb.notifications import outbox, sending, services
        from dstackweb.notifications.models import Channel, ChannelKind
        from dstackweb.runs import transitions, usage
        from dstackweb.scheduler.models import RetentionKind
        from dstackweb.scheduler.processes import retention, tasks

        post_save.connect(outbox.on_host_event, sender=HostEvent, dispatch_uid="notifications.host_events")
        usage.budget_marked.connect(outbox.on_budget_marks, dispatch_uid="notifications.budgets")
        transitions.events_written.connect(outbox.on_run_events, dispatch_uid="notifications.run_events")
        post_save.connect(services.make_bell, sender=User, dispatch_uid="notifications.bell")
        retention.register(RetentionKind.NOTIFICATIONS, services.old)
        tasks.register_calls("notifications", sending.send_due, sending.EVERY_S, sending.has_due)
        tasks.register("conditions", lambda: outbox.check_conditions(timezone.now()), outbox.CONDITIONS_EVERY_S)
        recorder.watch(
            Channel,
            Watched(
                AuditKind.CHANNEL,
                ("user", "kind", "name", "enabled", "quiet_from", "quiet_until", "digest_at"),
                secret=("url", "key"),
                which=lambda channel: channel.kind != ChannelKind.APP,  # which comes and goes with its user
            ),
        )
