"""How hosts isolate and limit jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext_lazy as _

from dstackweb.backends.models import CgroupCode, EngineCode, Isolation
from dstackweb.wording.sentence import words

isolation = words(
    {
        Isolation.SANDBOX: _("a sandbox for each job, and a user for each project"),
        Isolation.PROJECT: _("a user for each project"),
        Isolation.USER: _("one user for all jobs, not the server's"),
        Isolation.CONTAINER: _("containers"),
        Isolation.SHARED: _("none: jobs share the server's user"),
        Isolation.NONE: _("none: jobs are refused"),
    }
)
"""How a host isolates jobs."""

no_cgroups = words(
    {
        CgroupCode.NOT_MOUNTED: _("the machine has no cgroups"),
        CgroupCode.READ_ONLY: _("cgroups are read-only, as in a container without privileges"),
        CgroupCode.NOT_PERMITTED: _("the host's user may not create cgroups; start the host as root"),
        CgroupCode.NO_CONTROLLERS: _("the machine gives it no memory and CPU controllers"),
        CgroupCode.FAILED: _("a cgroup could not be created"),
    }
)
"""Why a host's jobs are not limited by cgroups."""


no_engine = words(
    {
        EngineCode.NOT_FOUND: _("neither Docker nor Podman is installed"),
        EngineCode.AWAY: _("its daemon gives no answer"),
        EngineCode.NOT_PERMITTED: _("the host's user may not use it; start the host as root"),
        EngineCode.FAILED: _("it can't be used"),
    }
)
"""Why a host runs no containers."""

ENGINES = {"docker": "Docker", "podman": "Podman"}


def engine(found: Mapping[str, Any]) -> str:
    """What a host runs containers with."""
    name = ENGINES.get(found.get("name", ""), "")
    if not found:
        return str(_("none"))
    if not found.get("code"):
        return f"{name} {found.get('version', '')}".strip()
    if not name:
        return str(_("none: %s") % no_engine(found["code"]))
    return str(_("%(engine)s: %(why)s") % {"engine": name, "why": no_engine(found["code"])})


def limits(cgroups: Mapping[str, Any]) -> str:
    """Whether a host limits the memory and CPUs of its jobs."""
    if not cgroups:
        return str(_("not known"))
    if not cgroups.get("code"):
        return str(_("memory and CPUs, by cgroups %s") % cgroups["version"])
    why = ": ".join(filter(None, [no_cgroups(cgroups["code"]), cgroups.get("error", "")]))
    return str(_("none: %s") % why)
