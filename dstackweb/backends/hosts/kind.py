"""The team's own hosts as a kind of backend: no settings, no price."""

from __future__ import annotations

from uuid import UUID

from django.conf import settings

from dstackweb.backends.contract import Hosts, LaunchSpec, Offer, Presence, StartFailed
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

    def start(self, launch: LaunchSpec, host_id: int) -> None:
        """Start the job's runner on this machine. Raises StartFailed, also for another machine."""
        host = Host.objects.get(pk=host_id)
        if host.name != settings.DSTACKWEB_HOST_NAME:
            raise StartFailed(f"job {launch.job} belongs on {host.name}; this is {settings.DSTACKWEB_HOST_NAME}")
        local.ensure_runner(
            {
                **local.orders(launch.job, launch.token, host.runs_dir, launch.run_uid, launch.node),
                "api": launch.api_url,
                "user": host.job_user or None,
                "writable": settings.DSTACKWEB_JOB_WRITABLE if host.isolation == Isolation.SANDBOX else None,
                "engine": local.engine_orders(launch.image),
                "path": local.job_path(),
                "relay": str(local.relay_path()),
                "request_id": logs.request_id.get(),
            }
        )

    def observe(self, job: UUID) -> Presence:
        """What is left of the job on this machine."""
        if local.runner_alive(job):
            return Presence.ALIVE
        return Presence.GONE if local.tree_gone(job) else Presence.ORPHANED

    def stop(self, job: UUID, grace_s: int | None) -> bool:
        """With a grace: have the runner call the API, which stops it. Without: kill. True if all is gone."""
        if grace_s is None:
            return local.kill_job(job)
        return not local.here().nudge(str(job)) and local.tree_gone(job)


class HostsKind(Kind):
    """Created by the first start; hosts join it one by one."""

    name = "hosts"
    label = "Own hosts"
    driver_class = HostsBackend
    costs_money = False
    is_hosts = True
