"""What a job's runner is to execute, put together when it asks, so that secrets are never stored in a spec."""

from __future__ import annotations

import json
from typing import Any

from django.conf import settings

from dstackweb.accounts.services import secret_values
from dstackweb.lib.secrets import decrypt
from dstackweb.runs.models import Job
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.secrets import fill_secrets, secret_names

MASKED_FROM = 4
"""Shorter values stand in any log by chance, and masking them would only show where."""


def runner_spec(job: Job) -> dict[str, Any]:
    """The JSON of docs/runner.md for one claimed job."""
    run = job.run
    spec = EffectiveSpec.model_validate(run.spec)
    attempt = list(Job.objects.select_related("host").filter(run=run, attempt=job.attempt).order_by("node"))
    master = attempt[0].host
    wanted = secret_names(spec.env)
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
        "redact": sorted({value for value in (*secrets.values(), *masked.values()) if len(value) >= MASKED_FROM}),
        "setup": job.host.setup if job.host else "",
        "host": job.host.name if job.host else "",
        "host_address": job.host.address if job.host else "",
        "gpus": job.gpus,
        "nodes": len(attempt),
        "master_ip": (master.address if master else "") or "127.0.0.1",
        "gpus_per_node": len(job.gpus),
        "gpus_total": sum(len(other.gpus) for other in attempt),
        "archive": {"sha256": run.archive.sha256, "size": run.archive.size} if run.archive else None,
        "max_duration_s": run.limit_s,
        "stop_duration_s": spec.stop_duration_s,
        "lost_after_s": settings.DSTACKWEB_LOST_AFTER_S if spec.retry else None,
        "log_limit": settings.DSTACKWEB_LOG_LIMIT_MB * 1024 * 1024,
        "image": spec.image,
    }
