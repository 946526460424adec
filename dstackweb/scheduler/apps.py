from django.apps import AppConfig


class SchedulerConfig(AppConfig):
    name = "dstackweb.scheduler"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Turn the hints of the apps below into queued tasks."""
        from dstackweb.runs import hints
        from dstackweb.scheduler import tasks

        hints.pass_due.connect(tasks.enqueue_pass, dispatch_uid="scheduler.pass")
        hints.jobs_due.connect(tasks.enqueue_looks, dispatch_uid="scheduler.look")
