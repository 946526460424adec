"""The team's own hosts as a kind of backend: no settings, no price."""

from __future__ import annotations

from uuid import UUID

from django.conf import settings

from dstackweb.backends.contract import Handle, Hosts, LaunchSpec, Offer, Presence, StartFailed
from dstackweb.backends.hosts import local
from dstackweb.backends.hosts.fit import host_offers
from dstackweb.backends.hosts.inventory import host_views
from dstackweb.backends.kinds import Kind
from dstackweb.backends.models import Backend, Host, Isolation
from dstackweb.lib import logs
from dstackweb.spec.effective import Requirements


class HostsBackend(Hosts):
    """`start`, `observe` and `stop` work on the machine they are called on, without a network."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def offers(self, requirements: Requirements, *, image: str | None = None) -> list[Offer]:
        """Each host, idle ones first; from rows, so there is nothing to cache."""
        return host_offers(host_views(self.backend), requirements, backend=self.backend.name, image=image)

    def start(self, launch: LaunchSpec, offer: Offer) -> Handle:
        """Start the job's runner on this machine. Raises StartFailed, also for another machine's offer."""
        assert offer.host_id is not None, "an offer of this backend names its host"
        host = Host.objects.get(pk=offer.host_id)
        if host.name != settings.DSTACKWEB_HOST_NAME:
            raise StartFailed(f"job {launch.job_id} belongs on {host.name}; this is {settings.DSTACKWEB_HOST_NAME}")
        job_id = UUID(launch.job_id)
        local.ensure_runner(
            {
                "api": launch.api_url,
                "job": launch.job_id,
                "token": launch.token,
                "state_dir": str(local.state_dir(job_id)),
                "run_dir": str(local.run_dir(host.runs_dir, UUID(launch.run_uid), launch.node)),
                "user": host.job_user or None,
                "writable": settings.DSTACKWEB_JOB_WRITABLE if host.isolation == Isolation.SANDBOX else None,
                "engine": local.engine_orders(launch.image),
                "path": local.job_path(),
                "insecure": settings.DSTACKWEB_INSECURE_HTTP,
                "relay": str(local.relay_path()),
                "request_id": logs.request_id.get(),
            }
        )
        return Handle(job=launch.job_id, ref=host.name)

    def observe(self, handle: Handle) -> Presence:
        """What is left of the job on this machine."""
        job_id = UUID(handle.job)
        if local.runner_alive(job_id):
            return Presence.ALIVE
        return Presence.GONE if local.tree_gone(job_id) else Presence.ORPHANED

    def stop(self, handle: Handle, grace_s: int | None) -> bool:
        """With a grace: have the runner call the API, which stops it. Without: kill. True if all is gone."""
        job_id = UUID(handle.job)
        if grace_s is None:
            return local.kill_job(job_id)
        return not local.here().nudge(handle.job) and local.tree_gone(job_id)


class HostsKind(Kind):
    """Created by the first start; hosts join it one by one."""

    name = "hosts"
    label = "Own hosts"
    driver_class = HostsBackend
    costs_money = False
    is_hosts = True
