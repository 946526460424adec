"""What happened to a host, in a sentence each."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from dstackweb.backends.models import HostEvent
from dstackweb.wording import units


def told(event: HostEvent) -> str:
    """The sentence of one event, without who did it; an unknown kind is shown as it is."""
    data: dict[str, Any] = event.data
    match event.kind:
        case "joined":
            has = [units.cpus(data.get("cpus", 0)), units.mebibytes(data.get("memory_mib"))]
            return _("joined with %s") % ", ".join([*has, *([units.gpus(data["gpus"])] if data.get("gpus") else [])])
        case "labelled":
            given = [f"{name}={value}" for name, value in data.get("set", {}).items()]
            texts = [_("labelled %s") % ", ".join(given)] if given else []
            if data.get("removed"):
                texts.append(_("no longer labelled %s") % ", ".join(data["removed"]))
            return "; ".join(texts)
        case "sampling_fails":
            return _("not all its GPUs can be read: %(error)s") % {"error": data.get("error", "")}
    return {
        "started": _("its process was started"),
        "drained": _("drained: takes no new jobs"),
        "undrained": _("takes jobs again"),
        "leaving": _("told to leave"),
        "left": _("left"),
        "offline": _("went offline"),
        "online": _("is back online"),
        "nvml_missing": _("no NVML library: its GPUs, if it has any, are not seen"),
        "nvml_found": _("NVML's library is there"),
        "sampling_works": _("all its GPUs can be read again"),
    }.get(event.kind, event.kind.replace("_", " "))


def isolation(code: str) -> str:
    """How a host keeps jobs apart from the server."""
    return {
        "user": _("jobs run as another user"),
        "container": _("jobs run in containers"),
        "shared": _("none: jobs share the server's user"),
        "none": _("none: jobs are refused"),
    }.get(code, code)
