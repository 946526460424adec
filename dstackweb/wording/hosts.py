"""How hosts isolate and limit jobs, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.backends.models import CgroupCode, EngineCode, HostEvent, HostEventKind, Isolation, StartError
from dstackweb.wording.sentence import clauses, listing, words
from dstackweb.wording.units import cpus, gpus, mebibytes

isolation = words(
    {
        Isolation.SANDBOX: gettext_lazy("a sandbox for each job, and a user for each project"),
        Isolation.PROJECT: gettext_lazy("a user for each project"),
        Isolation.USER: gettext_lazy("one user for all jobs, not the server's"),
        Isolation.CONTAINER: gettext_lazy("containers"),
        Isolation.SHARED: gettext_lazy("none: jobs share the server's user"),
        Isolation.NONE: gettext_lazy("none: jobs are refused"),
    }
)
"""How a host isolates jobs."""

no_cgroups = words(
    {
        CgroupCode.NOT_MOUNTED: gettext_lazy("the machine has no cgroups"),
        CgroupCode.READ_ONLY: gettext_lazy("cgroups are read-only, as in a container without privileges"),
        CgroupCode.NOT_PERMITTED: gettext_lazy("the host's user may not create cgroups; start the host as root"),
        CgroupCode.NO_CONTROLLERS: gettext_lazy("the machine gives it no memory and CPU controllers"),
        CgroupCode.FAILED: gettext_lazy("a cgroup could not be created"),
    }
)
"""Why a host's jobs are not limited by cgroups."""


no_engine = words(
    {
        EngineCode.NOT_FOUND: gettext_lazy("neither Docker nor Podman is installed"),
        EngineCode.AWAY: gettext_lazy("its daemon gives no answer"),
        EngineCode.NOT_PERMITTED: gettext_lazy("the host's user may not use it; start the host as root"),
        EngineCode.FAILED: gettext_lazy("it can't be used"),
    }
)
"""Why a host runs no containers."""

ENGINES = {"docker": "Docker", "podman": "Podman"}


def engine(found: Mapping[str, Any]) -> str:
    """What a host runs containers with."""
    name = ENGINES.get(found.get("name", ""), "")
    if not found:
        return _("none")
    if not found.get("code"):
        return f"{name} {found.get('version', '')}".strip()
    if not name:
        return _("none: %s") % no_engine(found["code"])
    return _("%(engine)s: %(why)s") % {"engine": name, "why": no_engine(found["code"])}


def limits(cgroups: Mapping[str, Any]) -> str:
    """Whether a host limits the memory and CPUs of its jobs."""
    if not cgroups:
        return _("not known")
    if not cgroups.get("code"):
        return _("memory and CPUs, by cgroups %s") % str(cgroups["version"])
    why = _(": ").join(filter(None, [no_cgroups(cgroups["code"]), cgroups.get("error", "")]))
    return _("none: %s") % why


def event_text(event: HostEvent) -> str:
    """The sentence of an event of a host, without who did it."""
    data = {"reason": "", "error": "", **event.data}
    match event.kind:
        case HostEventKind.JOINED:
            size = [cpus(data.get("cpus", 0)), mebibytes(data.get("memory_mib"))]
            data["size"] = listing([*size, gpus(data["gpus"])] if data.get("gpus") else size)
        case HostEventKind.LABELLED:
            return _labelled(data)
        case HostEventKind.HELD_BACK:
            data["error"] = start_error(data["error"])
    return _EVENTS(event.kind) % data


_EVENTS = words(
    {
        HostEventKind.JOINED: gettext_lazy("joined with %(size)s"),
        HostEventKind.LABELLED: gettext_lazy("labels changed"),
        HostEventKind.STARTED: gettext_lazy("its agent started"),
        HostEventKind.DRAINED: gettext_lazy("drained: takes no new jobs"),
        HostEventKind.UNDRAINED: gettext_lazy("takes jobs again"),
        HostEventKind.LEAVING: gettext_lazy("asked to leave"),
        HostEventKind.LEFT: gettext_lazy("left"),
        HostEventKind.OFFLINE: gettext_lazy("went offline"),
        HostEventKind.ONLINE: gettext_lazy("is back online"),
        HostEventKind.HELD_BACK: gettext_lazy("held back because starts fail: %(error)s"),
        HostEventKind.TAKES_JOBS: gettext_lazy("no longer held back: takes jobs again"),
        HostEventKind.GONE: gettext_lazy("declared gone, and its jobs ended: %(reason)s"),
        HostEventKind.REVOKED: gettext_lazy("its token was revoked: the machine must join again"),
        HostEventKind.ADMITTED: gettext_lazy("a machine joined under this name with a join token"),
        HostEventKind.NVML_MISSING: gettext_lazy("no NVML library: GPUs cannot be detected"),
        HostEventKind.NVML_FOUND: gettext_lazy("NVML library found"),
        HostEventKind.SAMPLING_FAILS: gettext_lazy("some GPUs cannot be read: %(error)s"),
        HostEventKind.SAMPLING_WORKS: gettext_lazy("all GPUs can be read again"),
    }
)


def start_error(error: str) -> str:
    """Why starts fail on a host; `error` is empty if runners start there and don't call."""
    if error == StartError.COMMANDS_FAIL:
        return _("commands of three runs ended within 5 s as not found or not executable (126, 127)")
    return error or _("its runners do not reach the server")


def _labelled(data: Mapping[str, Any]) -> str:
    given = [f"{name}={value}" for name, value in data.get("set", {}).items()]
    texts = [_("labels set: %s") % listing(given)] if given else []
    if data.get("removed"):
        texts.append(_("labels removed: %s") % listing(data["removed"]))
    return clauses(texts) or _EVENTS(HostEventKind.LABELLED)
