"""What happened to a host, and how it isolates jobs."""

from __future__ import annotations

from typing import Any, assert_never

from django.utils.translation import gettext as _

from dstackweb.backends.models import HostEvent, HostEventKind, Isolation
from dstackweb.wording.sentence import as_text, known
from dstackweb.wording.units import cpus, gpus, mebibytes


def told(event: HostEvent) -> str:
    """The sentence of one event, without who did it."""
    kind = known(HostEventKind, event.kind)
    return as_text(event.kind) if kind is None else _event(kind, event.data)


def _event(kind: HostEventKind, data: dict[str, Any]) -> str:
    match kind:
        case HostEventKind.JOINED:
            size = [cpus(data.get("cpus", 0)), mebibytes(data.get("memory_mib"))]
            return _("joined with %s") % ", ".join([*size, *([gpus(data["gpus"])] if data.get("gpus") else [])])
        case HostEventKind.LABELLED:
            return _labelled(data)
        case HostEventKind.STARTED:
            return _("its agent started")
        case HostEventKind.DRAINED:
            return _("drained: takes no new jobs")
        case HostEventKind.UNDRAINED:
            return _("takes jobs again")
        case HostEventKind.LEAVING:
            return _("asked to leave")
        case HostEventKind.LEFT:
            return _("left")
        case HostEventKind.OFFLINE:
            return _("went offline")
        case HostEventKind.ONLINE:
            return _("is back online")
        case HostEventKind.NVML_MISSING:
            return _("no NVML library: GPUs cannot be detected")
        case HostEventKind.NVML_FOUND:
            return _("NVML library found")
        case HostEventKind.SAMPLING_FAILS:
            return _("some GPUs cannot be read: %s") % str(data.get("error", ""))
        case HostEventKind.SAMPLING_WORKS:
            return _("all GPUs can be read again")
        case never:
            assert_never(never)


def _labelled(data: dict[str, Any]) -> str:
    given = [f"{name}={value}" for name, value in data.get("set", {}).items()]
    texts = [_("labels set: %s") % ", ".join(given)] if given else []
    if data.get("removed"):
        texts.append(_("labels removed: %s") % ", ".join(data["removed"]))
    return "; ".join(texts)


def isolation(code: str) -> str:
    """How a host keeps jobs apart from the server."""
    found = known(Isolation, code)
    match found:
        case Isolation.USER:
            return _("jobs run as another user")
        case Isolation.CONTAINER:
            return _("jobs run in containers")
        case Isolation.SHARED:
            return _("none: jobs share the server's user")
        case Isolation.NONE:
            return _("none: jobs are refused")
        case None:
            return code
        case never:
            assert_never(never)
