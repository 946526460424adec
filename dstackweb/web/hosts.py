"""The list of hosts, the page of one, and what deployment admins do: drain, remove and add hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.http import HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _, ngettext

from dstackweb.accounts.access import visible_projects
from dstackweb.backends.hosts import inventory, joining
from dstackweb.backends.models import Gpu, Host, HostEvent
from dstackweb.gpus.models import HostSampling
from dstackweb.lib.errors import Forbidden, NotFound
from dstackweb.lib.network import is_exposed
from dstackweb.runs import holds
from dstackweb.runs.holds import HoldInfo
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JOB_ACTIVE
from dstackweb.scheduler import team_hosts
from dstackweb.scheduler.team_hosts import HostSummary, ReservedCapacity, list_hosts
from dstackweb.web.common.pages import (
    PageRequest,
    done,
    fingerprint,
    polled,
    project_action,
    project_page,
    public_url,
    yes_or_no,
)
from dstackweb.web.gpus import gpu_rows
from dstackweb.wording import hosts as host_words, units
from dstackweb.wording.sentence import listing

EVENTS_IN_LIST = 3
POLL_S = 5
JOBS_SHOWN = 30
"""Ended jobs; active jobs are all shown."""
EVENTS_ON_PAGE = 20


class Visible(NamedTuple):
    """The reader's projects, and which runs of these hosts are holds."""

    projects: set[int]
    held: dict[int, HoldInfo]

    @classmethod
    def of(cls, request: PageRequest, hosts: Sequence[HostSummary]) -> Visible:
        runs = (run.pk for one in hosts for _gpu, run in one.gpus if run)
        return cls({project.pk for project in visible_projects(request.user)}, holds.active_holds(runs))


class HostGpuLine(NamedTuple):
    """One GPU: the run that uses it, its reservation, and use outside dstackweb."""

    gpu: Gpu
    run: Run | None
    hidden: bool
    stranger: str
    kept: bool
    held: HoldInfo | None = None


def _gpu_line(gpu: Gpu, run: Run | None, kept: ReservedCapacity | None, known: Visible) -> HostGpuLine:
    """The row; runs of projects that the reader cannot see have no name."""
    stranger = ""
    if gpu.stranger:
        who = {"user": gpu.stranger.get("user", "?"), "pid": gpu.stranger.get("pid", "?")}
        # The owner of a hold uses the GPU with processes outside the run.
        text = _("used by %(user)s, pid %(pid)s") if run and run.pk in known.held else None
        stranger = (text or _("used outside dstackweb by %(user)s, pid %(pid)s")) % who
    hidden = run is not None and run.project_id not in known.projects
    held = known.held.get(run.pk) if run and not hidden else None
    return HostGpuLine(gpu, run, hidden, stranger, kept is not None and gpu.uuid in kept.gpus, held)


@dataclass(frozen=True)
class HostLine:
    """One host with its GPUs, reservation and recent events."""

    of: HostSummary
    isolation: str
    limits: str
    engine: str
    gpus: list[HostGpuLine]
    events: list[tuple[HostEvent, str]]
    kept_hidden: bool
    may_leave: bool

    @property
    def start_error(self) -> str:
        return host_words.start_error(self.of.host.start_error)

    @property
    def engine_fails(self) -> bool:
        return inventory.engine_fails(self.of.host)

    @property
    def kept_text(self) -> str:
        """What is reserved: `2 GPUs, 8 CPUs, 64 GB`."""
        kept = self.of.kept
        if kept is None:
            return ""
        parts = [units.cpus(kept.cpus), units.mebibytes(kept.memory_mib)]
        return listing([units.gpus(len(kept.gpus)), *parts] if kept.gpus else parts)

    @property
    def stamp(self) -> tuple[Any, ...]:
        """Everything that the page shows of it; the time it was last seen only while it is offline."""
        host, kept = self.of.host, self.of.kept
        taken = [(g.gpu.uuid, g.gpu.present, g.run.pk if g.run else None, g.stranger, g.held) for g in self.gpus]
        seen = None if self.of.online else host.seen_at
        return (host.name, self.of.online, seen, host.draining, host.leaving, host.error, host.isolation,
                host.held_back_at, host.start_error, self.limits, self.engine,
                str(host.labels), host.cpus, host.cpus_used, host.memory_mib, host.memory_used_mib, taken,
                self.of.jobs, (kept.run.pk, kept.cpus, kept.memory_mib, sorted(kept.gpus)) if kept else None,
                [event.pk for event, _text in self.events])  # fmt: skip


def host_line(found: HostSummary, known: Visible) -> HostLine:
    return HostLine(
        of=found,
        isolation=host_words.isolation(found.host.isolation),
        limits=host_words.limits(found.host.cgroups),
        engine=host_words.engine(found.host.engine),
        gpus=[_gpu_line(gpu, run, found.kept, known) for gpu, run in found.gpus],
        events=[(event, host_words.event_text(event)) for event in found.events],
        may_leave=inventory.may_leave(found.host),
        kept_hidden=found.kept is not None and found.kept.run.project_id not in known.projects,
    )


@project_page()
def hosts_page(request: PageRequest) -> HttpResponse:
    return _hosts_page(request)


def _hosts_page(request: PageRequest, **more: Any) -> HttpResponse:
    """The hosts page, with `more` context that is shown once."""
    found = list_hosts(events=EVENTS_IN_LIST)
    known = Visible.of(request, found)
    lines = [host_line(one, known) for one in found]
    version = fingerprint([line.stamp for line in lines])

    def context() -> dict[str, Any]:
        may_invite = request.user.is_superuser and not request.htmx
        return {"hosts": lines, **(_join_panel(request) if may_invite else {}), **more}

    return polled(request, "hosts/hosts.html", "hosts/hosts_list.html", version, context)


def _join_panel(request: PageRequest) -> dict[str, Any]:
    url = public_url(request)
    return {"invites": joining.open_invites(), "url": url, "obstacles": joining.loopback(url)}


@project_page()
def host_page(request: PageRequest, host: str) -> HttpResponse:
    now, found = timezone.now(), _found(host)
    known = Visible.of(request, [found])
    line = host_line(found, known)
    gpus = gpu_rows.of_hosts([found], known.projects, now)
    sampling = HostSampling.objects.filter(host=found.host).first()
    running, ended = _jobs(found.host)
    sampled = (sampling.at, sampling.library, sampling.error) if sampling else None
    jobs = [(job.pk, job.status) for job in [*running, *ended]]
    version = fingerprint(line.stamp, [gpu.stamp for gpu in gpus], sampled, jobs)

    def context() -> dict[str, Any]:
        return {
            "line": line,
            "host": found.host,
            "listed": found,
            "gpus": gpus,
            "sampling": sampling,
            "running": running,
            "ended": ended,
            "seen": known.projects,
            "here": True,
            "may_declare_gone": request.user.is_superuser and not found.online and bool(running),
            "gpus_url": reverse("web:gpus", args=[request.project.name]),
            "poll_s": POLL_S,
        }

    return polled(request, "hosts/host.html", "hosts/host_body.html", version, context)


def _found(name: str) -> HostSummary:
    found = list_hosts(name, events=EVENTS_ON_PAGE)
    if not found:
        raise NotFound(_("no host %s") % name)
    return found[0]


def _jobs(host: Host) -> tuple[list[Job], list[Job]]:
    jobs = Job.objects.filter(host=host).select_related("run__project", "run__user")
    running = jobs.filter(status__in=JOB_ACTIVE).order_by("placed_at", "pk")
    ended = jobs.exclude(status__in=JOB_ACTIVE).order_by("-ended_at", "pk")[:JOBS_SHOWN]
    return list(running), list(ended)


def _check_is_admin(request: PageRequest) -> None:
    if not request.user.is_superuser:
        raise Forbidden(_("Only deployment admins can manage hosts."))


def _managed(request: PageRequest, host: str) -> Host:
    _check_is_admin(request)
    return inventory.find(host)


@project_action()
def drain(request: PageRequest, host: str) -> HttpResponse:
    """Drain a host (`on=yes`), or undrain it (`on=no`), which also cancels its removal.

    Goes back to the list or, with `back=host`, to the host's page.
    """
    found, on = _managed(request, host), yes_or_no(request, "on")
    inventory.set_draining(found, request.user, on)
    text = _("%s is draining: it gets no new jobs, running jobs continue.") if on else _("%s accepts jobs again.")
    return _back(request, text % found.name, found if request.POST.get("back") == "host" else None)


@project_action()
def leave(request: PageRequest, host: str) -> HttpResponse:
    found = _managed(request, host)
    inventory.leave(found, request.user)
    return _back(request, _("%s gets no new jobs, and will be removed once its jobs have ended.") % found.name)


@project_action()
def clear(request: PageRequest, host: str) -> HttpResponse:
    """Place jobs again on a host that is held back."""
    found = _managed(request, host)
    team_hosts.take_jobs_again(found, request.user)
    return _back(request, _("%s accepts jobs again.") % found.name, found)


@project_action()
def revoke(request: PageRequest, host: str) -> HttpResponse:
    """End the token of a host's agent."""
    found = _managed(request, host)
    joining.revoke(found, request.user)
    return _back(request, _("%s must join again. Its running jobs continue.") % found.name, found)


@project_action()
def gone(request: PageRequest, host: str) -> HttpResponse:
    """End the jobs of a host whose machine is gone."""
    found = _managed(request, host)
    ended = team_hosts.declare_gone(found, request.user, request.POST.get("reason", ""))
    text = ngettext("%d job has ended.", "%d jobs have ended.", ended) % ended
    return _back(request, text, found)


@project_action()
def invite(request: PageRequest) -> HttpResponse:
    """Create a join command. Its token is only in this response."""
    _check_is_admin(request)
    made, token = joining.invite(request.user)
    url = public_url(request)
    command = f"dstackweb host join {url} --token {token}{' --insecure' if is_exposed(url) else ''}"
    return _hosts_page(request, new_invite={"command": command, "until": made.expires_at})


@project_action()
def withdraw(request: PageRequest, invite_id: int) -> HttpResponse:
    _check_is_admin(request)
    joining.withdraw(invite_id)
    return _back(request, _("Join command revoked."))


def _back(request: PageRequest, text: str, host: Host | None = None) -> HttpResponse:
    """To the host's page, or to the list."""
    if host is not None:
        return done(request, text, "web:host", request.project.name, host.name)
    return done(request, text, "web:hosts", request.project.name)
