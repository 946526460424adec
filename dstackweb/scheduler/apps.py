from django.apps import AppConfig


class SchedulerConfig(AppConfig):
    name = "dstackweb.scheduler"

    def ready(self) -> None:
        """Turn the hints of the apps below into queued tasks."""
        from django.conf import settings
        from django.utils.crypto import salted_hmac
        from django_q.conf import Conf
        from django_q.signals import post_execute_in_worker, pre_execute

        from dstackweb.backends import api_calls
        from dstackweb.lib import logs
        from dstackweb.offers import counts, sources
        from dstackweb.progress import ingest
        from dstackweb.runs import task_failures, wakeups
        from dstackweb.scheduler.processes import tasks

        # Tasks are pickles that only their signature protects: their key signs nothing else.
        Conf.SECRET_KEY = salted_hmac("dstackweb.tasks", "", secret=settings.SECRET_KEY, algorithm="sha256").hexdigest()
        wakeups.pass_requested.connect(tasks.enqueue_pass, dispatch_uid="scheduler.pass")
        wakeups.job_checks_requested.connect(tasks.enqueue_job_checks, dispatch_uid="scheduler.job_checks")
        wakeups.cloud_checks_requested.connect(tasks.enqueue_cloud_polls, dispatch_uid="scheduler.cloud_polls")
        wakeups.task_settling_requested.connect(tasks.settle_tasks_soon, dispatch_uid="scheduler.ended_tasks")
        ingest.failures_rose.connect(task_failures.record_rises, dispatch_uid="runs.task_failures")
        sources.source_updated.connect(tasks.enqueue_pass, dispatch_uid="scheduler.source_updated")
        sources.change_expected.connect(tasks.refresh_offers_soon, dispatch_uid="scheduler.change_expected")
        sources.refresh_requested.connect(tasks.enqueue_refresh, dispatch_uid="scheduler.refresh")
        pre_execute.connect(logs.follow, dispatch_uid="scheduler.logs")
        post_execute_in_worker.connect(counts.flush, dispatch_uid="scheduler.counts")
        post_execute_in_worker.connect(api_calls.flush, dispatch_uid="scheduler.api_calls")
