"""What a job's runner is to execute, put together when it asks, so that secrets are never stored in a spec."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import quote

from django.conf import settings

from dstackweb.accounts.services import secret_values
from dstackweb.lib.secrets import decrypt
from dstackweb.runs.models import Job
from dstackweb.runs.tokens import tasks_token
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.env import fill_secrets, secret_names

MASKED_FROM = 4
"""Shorter values stand in any log by chance, and masking them would only show where."""


class JobAddress(NamedTuple):
    """What people call the machine of a job, and where its other nodes reach it; empty where that isn't known."""

    name: str = ""
    address: str = ""


def job_address(job: Job) -> JobAddress:
    """Where a job is, on a host or on a cloud's machine."""
    if job.host is not None:
        return JobAddress(job.host.name, job.host.address)
    if job.instance is not None:
        return JobAddress(job.instance.cloud_id, job.instance.address)
    return JobAddress()


def attempt_fields(job: Job) -> dict[str, Any]:
    """What the nodes of an attempt tell each other; known of all of them once each has its runner."""
    attempt = Job.objects.select_related("host", "instance").filter(run=job.run_id, attempt=job.attempt)
    nodes = list(attempt.order_by("node"))
    return {
        "master_ip": job_address(nodes[0]).address or "127.0.0.1",
        "gpus_total": sum(len(node.gpus) for node in nodes),
    }


def runner_spec(job: Job) -> dict[str, Any]:
    """The JSON of docs/runner.md for one claimed job."""
    run = job.run
    spec = EffectiveSpec.model_validate(run.spec)
    where, wanted, token = job_address(job), secret_names(spec.env), tasks_token(job.pk)
    secrets = {name: value for name, value in secret_values(run.project).items() if name in wanted}
    masked: dict[str, str] = json.loads(decrypt(run.env_secret)) if run.env_secret else {}
    return {
        "job": str(job.pk),
        "run": run.name,
        "run_uid": str(run.uid),
        "attempt": job.attempt,
        "node": job.node,
        "commands": spec.commands,
        "shell": spec.shell or "/bin/sh",
        "working_dir": spec.working_dir,
        "env": fill_secrets(spec.env, secrets) | masked,
        "redact": sorted(
            {value for value in (token, *secrets.values(), *masked.values()) if len(value) >= MASKED_FROM}
        ),
        # Where the commands tell of their tasks, below the address by which the runner reaches the API.
        "tasks": {"path": f"/api/v1/projects/{quote(run.project.name)}/runs/{run.uid}/tasks", "token": token},
        "setup": job.host.setup if job.host else "",
        "host": where.name,
        "host_address": where.address,
        "gpus": job.gpus,
        "nodes": spec.nodes,
        "gpus_per_node": len(job.gpus),
        # A host reads its own GPUs.
        "sample_every_s": settings.DSTACKWEB_SAMPLE_EVERY_S if job.gpus and job.host is None else None,
        **attempt_fields(job),
        "archive": {"sha256": run.archive.sha256, "size": run.archive.size} if run.archive else None,
        "max_duration_s": run.limit_s,
        "stop_duration_s": spec.stop_duration_s,
        "lost_after_s": settings.DSTACKWEB_LOST_AFTER_S if spec.retry else None,
        "log_limit": settings.DSTACKWEB_LOG_LIMIT_MB * 1024 * 1024,
        "image": spec.image,
    }
