"""Slurm as a kind of backend: its settings and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop, ngettext
from pydantic import Field

from dstackweb.backends.clusters import PROJECTS, ClusterKind, GpuSizes
from dstackweb.backends.kinds import ReportLine
from dstackweb.backends.slurm.commands import Commands
from dstackweb.backends.slurm.driver import OWN_USER, SlurmBackend
from dstackweb.spec.fields import Keys, Text, key

NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.,:&|-]*$"
Name = Annotated[str, Field(pattern=NAME)]
"""What may follow `--account=` and the like."""

WAITS: dict[str, Any] = {
    "Resources": gettext_lazy("not enough is free"),
    "Priority": gettext_lazy("jobs of higher priority wait in its partition"),
    "Licenses": gettext_lazy("all licenses are in use"),
    "Reservation": gettext_lazy("its reservation has not begun"),
    "ReservationDeleted": gettext_lazy("its reservation was deleted"),
    "ReqNodeNotAvail": gettext_lazy("a node that it needs is down, drained or reserved"),
    "NodeDown": gettext_lazy("a node that it needs is down"),
    "PartitionDown": gettext_lazy("its partition is down"),
    "PartitionInactive": gettext_lazy("its partition is inactive"),
    "PartitionNodeLimit": gettext_lazy("it needs more than its partition may use"),
    "PartitionTimeLimit": gettext_lazy("its max_duration is longer than its partition's time limit"),
    "InvalidAccount": gettext_lazy("its account is not valid"),
    "InvalidQOS": gettext_lazy("its QOS is not valid"),
    "JobHeldAdmin": gettext_lazy("an administrator of the cluster holds it"),
    "JobHeldUser": gettext_lazy("its user holds it"),
    "BurstBufferResources": gettext_lazy("its burst buffer is not available"),
}
"""Slurm's reasons (`squeue`'s `%r`) in words."""
LIMITS: dict[str, Any] = {
    "QOS": gettext_lazy("a limit of its QOS is reached"),
    "Assoc": gettext_lazy("a limit of its account or user is reached"),
}
"""How the many reasons begin that name a limit."""


class SlurmSettings(Keys):
    """What an admin sets."""

    projects: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100)] = key(*PROJECTS)
    partitions: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100)] = key(
        gettext_noop("a list of partitions, such as gpu"), gettext_noop("Partitions to use")
    )
    ssh_host: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9][\w.:-]*$")] | None = key(
        gettext_noop("a host, such as slurm@login.example"),
        gettext_noop("Login node to reach by SSH; empty: Slurm's commands are here"),
        title=gettext_noop("SSH host"),
        default=None,
    )
    ssh_key_file: Text | None = key(
        gettext_noop("a path"),
        gettext_noop("Private key for SSH, a file of the server"),
        default=None,
        title=gettext_noop("SSH key file"),
    )
    account: Name | None = key(gettext_noop("a name"), gettext_noop("Account to submit with"), default=None)
    qos: Name | None = key(
        gettext_noop("a name"), gettext_noop("Quality of service"), default=None, title=gettext_noop("QOS")
    )
    constraint: Name | None = key(
        gettext_noop("a list of features"), gettext_noop("Features that nodes need"), default=None
    )
    reservation: Name | None = key(gettext_noop("a name"), gettext_noop("Reservation to use"), default=None)
    gpu_memory: GpuSizes = key(
        gettext_noop("a list such as a100=80GB, v100=32GB"),
        gettext_noop("Memory of each type of GPU, which Slurm does not know"),
        default=(),
        title=gettext_noop("GPU memory"),
    )
    most_waiting: Annotated[int, Field(ge=1, le=1000)] = key(
        gettext_noop("a number from 1"),
        gettext_noop("Jobs waiting in a partition, from which it gets no more"),
        default=1,
    )
    login_environment: bool = key(
        gettext_noop("true or false"),
        gettext_noop("Jobs start with the environment of a login, which may take a node seconds"),
        default=False,
    )


class SlurmKind(ClusterKind):
    name = "slurm"
    label = "Slurm"
    driver_class = SlurmBackend
    schema = SlurmSettings
    part, engine, answers = gettext_lazy("Partitions"), gettext_lazy("Slurm"), gettext_lazy("Slurm answers.")
    own_user = OWN_USER
    setup_hint = gettext_lazy("Runs become batch jobs of a Slurm cluster, submitted when there is room for them.")

    def location(self, config: Mapping[str, Any]) -> str:
        return ", ".join(config["partitions"])

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        if detail.get("code") == "partition_down":
            return _("The partition takes no jobs.")
        text, number = super().offer_detail(detail), detail.get("waiting", 0)
        if detail.get("code") != "cluster_busy" or not number:
            return text
        waiting = ngettext("%(waiting)d job waits in Slurm", "%(waiting)d jobs wait in Slurm", number)
        return f"{text}; {waiting % detail}"

    def wait_reason(self, code: str) -> str:
        why = WAITS.get(code) or next((text for start, text in LIMITS.items() if code.startswith(start)), None)
        if why is None:
            return _("Slurm keeps it waiting: %s") % code
        return _("Slurm keeps it waiting: %(why)s (%(code)s)") % {"why": why, "code": code}

    def is_here(self, config: Mapping[str, Any]) -> bool:
        return not config.get("ssh_host")

    def check(self, config: Mapping[str, Any], secret: str) -> list[ReportLine]:
        """Ask for the partitions."""
        commands = Commands(config.get("ssh_host") or "", config.get("ssh_key_file") or "")
        known = commands.run("sinfo", "--noheader", "--format=%R").split()
        return [_partition(name, known) for name in config["partitions"]]


def _partition(name: str, known: Sequence[str]) -> ReportLine:
    if name in known:
        return ReportLine(name, "ok", "✓", _("found"))
    there = ", ".join(sorted(set(known))) or _("none")
    return ReportLine(name, "failed", "✗", _("no such partition"), _("Partitions there: %s.") % there)
