"""What a backend needs to start one job: all that it knows of a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LaunchSpec:
    """One node of one attempt. The runner fetches the commands itself, with the token, from `api_url`.

    `run_uid` names the run's directory, which attempts share; `gpu_uuids` are NVML's.
    """

    job_id: str
    run_name: str
    run_uid: str
    attempt: int
    node: int
    nodes: int
    cpus: int
    memory_mib: int
    api_url: str
    token: str = field(repr=False)
    gpu_uuids: tuple[str, ...] = ()
