"""What a job's runner and its commands get: what to run, their tokens, and where their tasks are counted.

The runner's spec is built when the runner requests it, so that no secret is stored in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict
from urllib.parse import quote
from uuid import UUID

from django.conf import settings
from django.core import signing
from django.db import transaction

from dstackweb.accounts.services import secret_values
from dstackweb.lib.errors import Conflict, DomainError
from dstackweb.lib.secrets import decrypt, encrypt
from dstackweb.progress.counters import ensure_scope
from dstackweb.progress.models import Scope
from dstackweb.progress.states import NoReports
from dstackweb.runner.exec_target import IDE_SOCKET
from dstackweb.runner.limits import ArtifactLeft
from dstackweb.runner.masking import Masker
from dstackweb.runs import artifacts, connections
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import ENDED, JOB_ACTIVE, PLACED, Reason
from dstackweb.runs.transitions import lock_run
from dstackweb.spec.codes import Ide
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.env import fill_secrets, secret_names
from dstackweb.spec.units import MAX_DURATION_S

MASKED_FROM = 4
"""Shorter values occur in any log by chance, and masking them would only show where."""
GIB = 1 << 30
MASKER_S, MASKERS = 30.0, 1000
_maskers: dict[tuple[UUID, int], tuple[float, Masker | None]] = {}


def _name_and_address(job: Job) -> tuple[str, str]:
    """The name of a job's host or cloud instance, and the address that other nodes reach; "" if unknown."""
    if job.host is not None:
        return job.host.name, job.host.address
    if job.instance is not None:
        return job.instance.cloud_id, job.instance.address
    return "", ""


def attempt_fields(run_id: int, attempt: int) -> dict[str, Any]:
    """What a node needs to know of the others of its attempt; complete once each has its runner."""
    jobs = Job.objects.select_related("host", "instance").filter(run=run_id, attempt=attempt)
    return _of_nodes(list(jobs.order_by("node")))


def _of_nodes(nodes: Sequence[Job]) -> dict[str, Any]:
    return {
        "master_ip": _name_and_address(nodes[0])[1] or "127.0.0.1",
        "gpus_total": sum(len(node.gpus) for node in nodes),
    }


def _secrets(run: Run, spec: EffectiveSpec) -> tuple[dict[str, str], dict[str, str]]:
    """The secrets of the project that the run names, and the values of its client's shell. Raises Conflict."""
    wanted = secret_names(spec.with_secrets())
    values = secret_values(run.project) if wanted else {}
    masked: dict[str, str] = json.loads(decrypt(run.env_secret)) if run.env_secret else {}
    return {name: value for name, value in values.items() if name in wanted}, masked


def _held(job: Job, now: Iterable[str]) -> set[str]:
    """Values of secrets that the job's processes may have, also of earlier runners: masked though replaced since."""
    before = _held_before(job.secrets_held)
    held = before.union(filter(None, now))
    if held != before:
        job.secrets_held = encrypt(json.dumps(sorted(held)))
        Job.objects.filter(pk=job.pk, status__in=JOB_ACTIVE).update(secrets_held=job.secrets_held)
    return held


def _held_before(stored: str) -> set[str]:
    return set(json.loads(decrypt(stored))) if stored else set()


def _to_mask(*values: str) -> list[str]:
    return sorted({value for value in values if len(value) >= MASKED_FROM})


def masker(run: Run) -> Masker | None:
    """Masks what the run's jobs know in texts that they report, as of the last MASKER_S; None if that can't be read."""
    now, key = time.monotonic(), (run.uid, run.attempt)
    until, found = _maskers.get(key, (0.0, None))
    if now >= until:
        jobs = Job.objects.filter(run=run.pk, attempt=run.attempt).values_list("pk", "secrets_held")
        try:
            secrets, masked = _secrets(run, EffectiveSpec.model_validate(run.spec))
            own = {value for pk, stored in jobs for value in (tasks_token(pk), *_held_before(stored))}
            own.add(ide_token(run.uid))
            found = Masker.of(_to_mask(*own, *secrets.values(), *masked.values()))
        except (DomainError, ValueError):
            found = None
        for old in [old for old, (ends, _masker) in list(_maskers.items()) if ends <= now]:
            _maskers.pop(old, None)
        if len(_maskers) >= MASKERS:
            _maskers.clear()
        _maskers[key] = now + MASKER_S, found
    return found


def runner_spec(job: Job) -> dict[str, Any]:
    """The JSON of docs/runner.md for one claimed job."""
    run = job.run
    spec = EffectiveSpec.model_validate(run.spec)
    (host, address), token, ide = _name_and_address(job), tasks_token(job.pk), _ide(run, spec)
    secrets, masked = _secrets(run, spec)
    if job.started_at is not None:  # a later runner starts nothing, and can do without a secret that was deleted
        secrets = dict.fromkeys(secret_names(spec.with_secrets()), "") | secrets
    return {
        "job": str(job.pk),
        "project": run.project_id,
        "least_isolation": run.project.least_isolation if job.host_id else "",
        "run": run.name,
        "run_uid": str(run.uid),
        "attempt": job.attempt,
        "node": job.node,
        "commands": commands(spec) if spec.is_dev_environment else spec.commands,
        "shell": spec.shell or "/bin/sh",
        "working_dir": spec.working_dir,
        "ticket": ticket(job, spec.nodes) if job.host else None,
        "env": fill_secrets(spec.env, secrets) | masked | _sweep(run) | _displaced(job) | ide,
        "redact": _to_mask(token, *ide.values(), *_held(job, secrets.values()), *masked.values()),
        # Where the commands report their tasks, below the address by which the runner reaches the API.
        "tasks": {"path": f"/api/v1/projects/{quote(run.project.name)}/runs/{run.uid}/tasks", "token": token},
        "setup": job.host.setup if job.host else "",
        "host": host,
        "host_address": address,
        "gpus": job.gpus,
        "nodes": spec.nodes,
        "gpus_per_node": len(job.gpus),
        **_limits(job, spec),
        # A host reads its own GPUs.
        "sample_every_s": settings.DSTACKWEB_SAMPLE_EVERY_S if job.gpus and job.host is None else None,
        **(_of_nodes([job]) if spec.nodes == 1 else attempt_fields(run.pk, job.attempt)),
        "archive": {"sha256": run.archive.sha256, "size": run.archive.size} if run.archive else None,
        "max_duration_s": run.limit_s,
        "stop_duration_s": spec.stop_duration_s,
        "lost_after_s": settings.DSTACKWEB_LOST_AFTER_S if spec.retry else None,
        "process_limit": settings.DSTACKWEB_JOB_PROCESSES,
        "log_limit": settings.DSTACKWEB_LOG_LIMIT_MB * 1024 * 1024,
        "log_marks": True,
        "artifacts": _artifacts(),
        "image": spec.image,
        "service_port": spec.port,
        "gateway": connections.gateway() if spec.needs_tunnel else None,
        **(_container(spec, secrets) if spec.image else {}),
    }


def _sweep(run: Run) -> dict[str, str]:
    """Which run of which sweep it is, for its commands."""
    if run.sweep is None:
        return {}
    return {"DSTACK_SWEEP": run.sweep.name, "DSTACK_SWEEP_INDEX": str(run.sweep_index)}


def _ide(run: Run, spec: EffectiveSpec) -> dict[str, str]:
    """Return JupyterLab's token as a variable, since all users of a host see arguments."""
    return {"JUPYTER_TOKEN": ide_token(run.uid)} if spec.ide == Ide.JUPYTER else {}


def _artifacts() -> dict[str, Any] | None:
    """What a job may leave, in bytes, files and seconds to send them; None where nothing is kept."""
    if not settings.DSTACKWEB_RUN_ARTIFACTS_MB:
        return None
    return {
        "file": artifacts.limit_of(ArtifactLeft.FILE_LIMIT),
        "files": artifacts.MOST_FILES,
        "seconds": settings.DSTACKWEB_ARTIFACTS_S,
    }


def _displaced(job: Job) -> dict[str, str]:
    """How often the run was displaced before this attempt, for its commands; nothing if it never was."""
    if job.attempt == 1:
        return {}
    before = Job.objects.filter(run=job.run_id, attempt__lt=job.attempt, termination_reason=Reason.PREEMPTED)
    times = before.order_by().values("attempt").distinct().count()
    return {"DSTACK_PREEMPTED": str(times)} if times else {}


def _container(spec: EffectiveSpec, secrets: dict[str, str]) -> dict[str, Any]:
    auth = spec.registry_auth
    return {
        "entrypoint": spec.entrypoint,
        "pull_policy": spec.pull_policy,
        "registry_auth": fill_secrets(auth.model_dump(), secrets) if auth else None,
        "volumes": list(spec.volumes or ()),
    }


def _limits(job: Job, spec: EffectiveSpec) -> dict[str, Any]:
    """A host's jobs keep within the upper ends of their ranges, and share what is short by the lower ends.

    A cloud instance is its job's alone.
    """
    if job.host is None:
        return {}
    return {
        "cpus": job.cpus,
        "cpu_max": spec.requirements.cpu_max,
        "memory_mib": job.memory_mib,
        "memory_max_mib": spec.requirements.memory_max_mib,
        "host_memory_mib": job.host.memory_mib,
        "disk_limit": settings.DSTACKWEB_JOB_DISK_GB * GIB or None,
        "disk_reserve": settings.DSTACKWEB_DISK_RESERVE_GB * GIB or None,
        "inode_reserve": settings.DSTACKWEB_INODE_RESERVE_PERCENT or None,
    }


# Tokens carry an id under the server's signature, so that nothing needs to be stored to check them.

JOB_SALT, TASKS_SALT, IDE_SALT = "dstackweb.job", "dstackweb.tasks", "dstackweb.ide"
TICKET_SALT = "dstackweb.ticket"


def job_token(job_id: UUID) -> str:
    return sign_id(job_id, JOB_SALT)


def job_of_token(token: str) -> UUID | None:
    """The job of a runner's token; None for any other string."""
    return read_id(token, JOB_SALT)


def tasks_token(job_id: UUID) -> str:
    """The token of a job's commands: valid for reporting tasks only."""
    return sign_id(job_id, TASKS_SALT)


def job_of_tasks_token(token: str) -> UUID | None:
    """The job of a token for reporting tasks; None for any other string."""
    return read_id(token, TASKS_SALT)


def ide_token(run_uid: UUID) -> str:
    """The token by which the gateway opens a run's JupyterLab: who only has its socket does not."""
    return sign_id(run_uid, IDE_SALT)


class Ticket(TypedDict):
    """Run and node of a job, and what it got of its host: what its row says, for a database that has lost it."""

    job: str
    run: str
    attempt: int
    node: int
    nodes: int
    host: str
    cpus: int
    memory_mib: int
    gpus: list[str]


def ticket(job: Job, nodes: int) -> str:
    """The ticket of a job that was placed on a host, signed: no host can make up that it got a job."""
    assert job.host is not None
    values = Ticket(
        job=str(job.pk), run=str(job.run.uid), attempt=job.attempt, node=job.node, nodes=nodes, host=job.host.name,
        cpus=job.cpus, memory_mib=job.memory_mib, gpus=job.gpus,
    )  # fmt: skip
    return signing.dumps(values, salt=TICKET_SALT)


def read_ticket(text: str) -> Ticket | None:
    """Return what `ticket` has signed; None for any other string."""
    try:
        values: Ticket = signing.loads(text, salt=TICKET_SALT)
    except signing.BadSignature:
        return None
    return values


def sign_id(value: UUID, salt: str) -> str:
    """A token for `value`. Tokens with different salts are never accepted for each other."""
    return signing.Signer(salt=salt).sign(str(value))


def read_id(token: str, salt: str) -> UUID | None:
    """The id that `sign_id` signed with this salt; None for any other string."""
    try:
        return UUID(signing.Signer(salt=salt).unsign(token))
    except (signing.BadSignature, ValueError):
        return None


def scope_for(run: Run, attempt: int | None = None) -> int:
    """The id of the scope of the run's current attempt. Raises Conflict with its `reason` (NoReports) for another."""
    _refuse_unless_open(run, attempt)
    scopes = Scope.objects.filter(project=run.project_id, run_id=run.pk, attempt=run.attempt)
    if (found := scopes.values_list("pk", flat=True).first()) is not None:
        return found
    with transaction.atomic():
        # Behind the run's row: the end of the attempt, which ends its scope, comes before this or finds it.
        run = lock_run(run.pk)
        _refuse_unless_open(run, attempt)
        return ensure_scope(run.project_id, run.pk, run.attempt)


def _refuse_unless_open(run: Run, attempt: int | None) -> None:
    if run.status in ENDED:
        reason = NoReports.RUN_OVER
        detail = f"the run has ended ({run.status}); its tasks can't be reported any more"
    elif attempt is not None and attempt < run.attempt:
        reason = NoReports.ATTEMPT_OVER
        detail = f"attempt {attempt} has ended; the run is at attempt {run.attempt}"
    elif run.status not in PLACED or (attempt is not None and attempt > run.attempt):
        reason = NoReports.NOT_YET
        detail = f"attempt {attempt or run.attempt} has not started; report its tasks once it runs"
    else:
        return
    raise Conflict(detail, reason=reason, attempt=run.attempt, status=run.status)


WAIT = f"""\
trap 'exit 0' TERM
echo "Ready: dstackweb ssh $DSTACK_RUN_NAME"
exec 2>/dev/null
sleep {MAX_DURATION_S} & wait $! || :"""
"""One sleep, not a loop: a shell that starts another one after TERM would leave it behind."""

JUPYTER = f"""\
if ! command -v jupyter-lab >/dev/null 2>&1; then
  echo "JupyterLab is not installed here: add it to the image or the host's set-up, or install it in \\`init\\`" >&2
  exit 127
fi
folder=$PWD
cd "$DSTACK_RUN_DIR" && rm -f {IDE_SOCKET}
exec jupyter-lab --no-browser --ServerApp.root_dir="$folder" --ServerApp.sock={IDE_SOCKET} \\
  --ServerApp.sock_mode=0600 --ServerApp.allow_remote_access=True --allow-root"""
"""On a socket in the run's directory, which only the job's user can open, with the token of `_ide`; the gateway, which
has it, asks who connects."""


def commands(spec: EffectiveSpec) -> list[str]:
    """What a dev environment runs: its `init`, then what people work with."""
    return [*(spec.init or ()), JUPYTER if spec.ide == Ide.JUPYTER else WAIT]
