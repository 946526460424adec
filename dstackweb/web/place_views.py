"""What the deployment has and how it does: hosts, profiles, health."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows, visible_projects
from dstackweb.backends.hosts.views import is_online
from dstackweb.backends.models import Gpu, Host
from dstackweb.profiles import selectors as profiles
from dstackweb.runs import holds, selectors, wording
from dstackweb.runs.holds import Held
from dstackweb.runs.models import Run
from dstackweb.web import health, run_words
from dstackweb.web.pages import PageRequest, polled, project_page


@dataclass(frozen=True)
class GpuLine:
    """One GPU, who holds it, and who uses it without asking."""

    gpu: Gpu
    run: Run | None
    hidden: bool
    stranger: str
    held: Held | None = None

    @classmethod
    def of(cls, gpu: Gpu, run: Run | None, seen: set[int], held: dict[int, Held]) -> GpuLine:
        """The row; a run of a project that the reader doesn't see stays nameless."""
        stranger = ""
        if gpu.stranger:
            who = {"user": gpu.stranger.get("user", "?"), "pid": gpu.stranger.get("pid", "?")}
            # Who holds a GPU for interactive work uses it with processes of no run's.
            text = _("used by %(user)s, pid %(pid)s") if run and run.pk in held else None
            stranger = (text or _("used outside dstackweb by %(user)s, pid %(pid)s")) % who
        hidden = run is not None and run.project_id not in seen
        return cls(gpu, run, hidden, stranger, held.get(run.pk) if run and not hidden else None)


@dataclass(frozen=True)
class HostLine:
    """One host with its GPUs."""

    host: Host
    online: bool
    isolation: str
    gpus: list[GpuLine]

    @property
    def stamp(self) -> tuple[Any, ...]:
        """What of it the page shows; the moment it was last seen counts only once it is offline."""
        host = self.host
        taken = [(g.gpu.uuid, g.gpu.present, g.run.pk if g.run else None, g.stranger, g.held) for g in self.gpus]
        seen = None if self.online else host.seen_at
        return (host.name, self.online, seen, host.draining, host.error, host.isolation, str(host.labels), host.cpus,
                host.cpus_used, host.memory_mib, host.memory_used_mib, taken)  # fmt: skip


@project_page()
def hosts_page(request: PageRequest) -> HttpResponse:
    """The team's own machines; also what polls of it get. A few rows: the version is what they show."""
    seen = {project.pk for project in visible_projects(request.user)}
    hosts = selectors.hosts_with_holders()
    held = holds.held(run.pk for _host, gpus in hosts for _gpu, run in gpus if run)
    lines = [
        HostLine(
            host, is_online(host), wording.isolation(host.isolation), [GpuLine.of(*pair, seen, held) for pair in gpus]
        )
        for host, gpus in hosts
    ]
    version = hashlib.sha256(repr([line.stamp for line in lines]).encode()).hexdigest()[:16]
    may_submit = allows(request.role, "member")
    context = {
        "hosts": lines,
        "may_submit": may_submit,
        "can_edit": request.user.is_staff,
        "waiting": _waiting(request),
    }
    return polled(request, "web/hosts.html", "web/hosts_list.html", version, lambda: context)


def _waiting(request: PageRequest) -> int:
    return selectors.counts(request.project)["submitted"]


@project_page()
def profiles_page(request: PageRequest) -> HttpResponse:
    """The profiles that runs of this project can name, and which one they get without naming any."""
    found = [
        {"profile": profile, "settings": run_words.profile_settings(profile.settings)}
        for profile in profiles.visible(request.project)
    ]
    context = {"profiles": found, "chosen": profiles.default(request.project), "can_edit": request.user.is_staff}
    return render(request, "web/profiles.html", context)


@project_page()
def health_page(request: PageRequest) -> HttpResponse:
    """How the deployment does; also what polls of it get."""
    checks = health.checks()
    version = hashlib.sha256(repr(checks).encode()).hexdigest()[:16]
    return polled(
        request,
        "web/health.html",
        "web/health_list.html",
        version,
        lambda: {"checks": checks, "worst": health.worst(checks), "waiting": _waiting(request)},
    )
