"""`dstackweb-server give_up RUN_ID`: end the jobs of a run whose host is gone for good, and free what they held."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser

from dstackweb.backends.hosts.inventory import is_online
from dstackweb.runs.attempts import end_job
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JOB_ACTIVE, Reason


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("run_id", type=UUID, help="the run's id, as shown on its page and in the API")

    def handle(self, *args: Any, **options: Any) -> None:
        run = Run.objects.filter(uid=options["run_id"]).first()
        if run is None:
            raise CommandError(f"no run with id {options['run_id']}")
        jobs = list(Job.objects.select_related("host").filter(run=run, status__in=JOB_ACTIVE))
        if not jobs:
            raise CommandError(f"{run.name} is {run.status}: it has no active job")
        for job in jobs:
            if job.host is not None and is_online(job.host):
                raise CommandError(
                    f"host {job.host.name} is online, so the job may still use its GPUs. Nothing was changed. "
                    "Stop the run instead."
                )
        for job in jobs:
            end_job(job.pk, Reason.INSTANCE_UNREACHABLE, detail={"code": MessageCode.GIVEN_UP})
            self.stdout.write(f"{run.name}: node {job.node} ended, its resources are free.")
