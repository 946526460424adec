from django.apps import AppConfig


class NotificationsConfig(AppConfig):
    name = "dstackweb.notifications"

    def ready(self) -> None:
        """Listen to events, in their transactions."""
        from django.db.models.signals import post_save

        from dstackweb.accounts.models import User
        from dstackweb.notifications import outbox, services
        from dstackweb.runs import transitions
        from dstackweb.scheduler.models import RetentionKind
        from dstackweb.scheduler.processes import retention

        transitions.events_written.connect(outbox.on_run_events, dispatch_uid="notifications.run_events")
        post_save.connect(services.make_bell, sender=User, dispatch_uid="notifications.bell")
        retention.register(RetentionKind.NOTIFICATIONS, services.old)
