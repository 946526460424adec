"""How hosts isolate and limit jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext_lazy as _

from dstackweb.backends.models import CgroupCode, Isolation
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


def limits(cgroups: Mapping[str, Any]) -> str:
    """Whether a host limits the memory and CPUs of its jobs."""
    if not cgroups:
        return str(_("not known"))
    if not cgroups.get("code"):
        return str(_("memory and CPUs, by cgroups %s") % cgroups["version"])
    why = ": ".join(filter(None, [no_cgroups(cgroups["code"]), cgroups.get("error", "")]))
    return str(_("none: %s") % why)
