"""Rows for tests, made by the product's own services wherever there is one."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Membership, Project, User
from dstackweb.backends.hosts.inventory import ensure_embedded_backend
from dstackweb.backends.models import Backend, Gpu, Host, Instance, InstanceStatus
from dstackweb.lib.models import Watch
from dstackweb.profiles.services import ensure_default_profile
from dstackweb.progress.models import Scope
from dstackweb.runs import attempts, prefix_counters, services
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import move_run
from dstackweb.scheduler.cloud.agents import join_token
from dstackweb.scheduler.passes.placement_pass import run_passes

_numbers = itertools.count(1)


def make_user(name: str | None = None, **fields: Any) -> User:
    """An active user without a usable password."""
    return User.objects.create_user(username=name or f"user{next(_numbers)}", **fields)


def make_project(name: str | None = None, **fields: Any) -> Project:
    """A project with its default queue, in a deployment with the seeded default profile."""
    ensure_default_profile()
    project = Project.objects.create(name=name or f"project{next(_numbers)}", **fields)
    services.ensure_queue(project)
    return project


def project_of(admin: User, name: str) -> Project:
    """A project with this admin."""
    project = make_project(name)
    join(project, admin, "admin")
    return project


def join(project: Project, user: User, role: str = "member") -> User:
    """Make someone a member."""
    Membership.objects.create(project=project, user=user, role=role)
    return user


def make_host(name: str = "box-1", *, cpus: int = 8, memory_gib: int = 32, gpus: int = 0, **fields: Any) -> Host:
    """A host that is online, with `gpus` A100 80 GB."""
    values = {
        "address": "127.0.0.1", "cluster": "", "cpus": cpus, "memory_mib": memory_gib * 1024,
        "isolation": "shared", "runs_dir": "/tmp/runs", "seen_at": timezone.now(),
    } | fields  # fmt: skip
    host = Host.objects.create(name=name, backend=ensure_embedded_backend(), **values)
    for index in range(gpus):
        Gpu.objects.create(
            host=host, uuid=f"GPU-{name}-{index}", index=index, name="NVIDIA A100-SXM4-80GB", memory_mib=81920
        )
    return host


def make_run(project: Project, user: User, name: str | None = None, *, role: str = "member", **keys: Any) -> Run:
    """A submitted run of one command; `keys` are keys of the run file."""
    config = {"type": "task", "name": name or f"run-{next(_numbers)}", "commands": ["true"], **keys}
    run, _made = services.submit(project, user, role, services.Submission(config))
    return run


def count_runs_anew() -> None:
    """Counters by prefix of the waiting and running runs that there are, where rows were written past the services."""
    Scope.objects.filter(run_id=0).delete()
    deltas = prefix_counters.PrefixDeltas()
    for run in Run.objects.only("project", "name", "status", "submitted_at"):
        deltas.add_new(run)
    deltas.write()


def place_all() -> int:
    """Run the real placement pass."""
    return run_passes()


def placed_job(run: Run, node: int = 0) -> Job:
    """The job of a run that a pass has placed."""
    return Job.objects.get(run=run, attempt=Run.objects.get(pk=run.pk).attempt, node=node)


def cloud_job(run: Run, **instance: Any) -> Job:
    """The job of a run that was placed on a cloud, whose machine has been started for it and has not called yet."""
    run.refresh_from_db()
    move_run(run, RunStatus.PROVISIONING, now=timezone.now())
    backend, _made = Backend.objects.get_or_create(name="aws", defaults={"kind": "aws"})
    made_id = uuid.uuid4()
    values = {
        "region": "us-east-1", "instance_type": "m7i.large", "cloud_id": f"i-{made_id.hex[:17]}",
        "status": InstanceStatus.STARTING, "launched_at": timezone.now(), "join_digest": join_token(made_id)[1],
    } | instance  # fmt: skip
    made = Instance.objects.create(pk=made_id, backend=backend, project=run.project, **values)
    job = Job.objects.create(run=run, attempt=run.attempt, backend=backend, instance=made)
    Instance.objects.filter(pk=made_id).update(holder=job.pk)
    made.refresh_from_db()
    return job


def start(job: Job, nonce: str = "nonce") -> Job:
    """What a runner reports up to the start of the commands."""
    attempts.claim_job(job.pk, nonce, job.host.name if job.host else "here")
    attempts.start_job(job.pk)
    job.refresh_from_db()
    return job


def as_if(jobs: QuerySet[Job], *, silent_s: float = 0, status_s: float = 0) -> None:
    """Let jobs have been silent, and in their status, for so long in the watcher's time."""
    now_s = Watch.now_s()
    jobs.update(heard_at_s=now_s - silent_s, status_at_s=now_s - status_s)


def scraper() -> Client:
    """Prometheus, with the token for /metrics."""
    return Client(headers={"Authorization": f"Bearer {settings.DSTACKWEB_METRICS_TOKEN}"})
