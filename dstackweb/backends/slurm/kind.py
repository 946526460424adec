"""Slurm as a kind of backend: its settings and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop, ngettext
from pydantic import AfterValidator, Field

from dstackweb.backends.contract import SourceFailed
from dstackweb.backends.kinds import ConnectionReport, Kind, ReportLine, ReportPart
from dstackweb.backends.slurm.commands import CommandFailed, Commands
from dstackweb.backends.slurm.driver import OWN_USER, SlurmBackend, gpu_memory, shares_servers_user
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


def _sizes(lines: tuple[str, ...]) -> tuple[str, ...]:
    gpu_memory(lines)
    return lines


class SlurmSettings(Keys):
    """What an admin sets."""

    projects: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100)] = key(
        gettext_noop("a list of projects, such as team-a"),
        gettext_noop(
            "Projects that may use it. Their jobs have one user: they can read each other's files and secrets"
        ),
    )
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
    gpu_memory: Annotated[tuple[Text, ...], AfterValidator(_sizes)] = key(
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


class SlurmKind(Kind):
    name = "slurm"
    label = "Slurm"
    driver_class = SlurmBackend
    schema = SlurmSettings
    costs_money = False
    is_machine = False
    can_test = True
    setup_hint = gettext_lazy("Runs become batch jobs of a Slurm cluster, submitted when there is room for them.")

    def projects(self, config: Mapping[str, Any]) -> Sequence[str]:
        return tuple(config.get("projects") or ())

    def location(self, config: Mapping[str, Any]) -> str:
        return ", ".join(config["partitions"])

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        data = {"free": 0, "total": 0, "waiting": 0, **detail}
        what = (
            _("%(free)d of %(total)d GPUs free")
            if detail.get("what") == "gpu"
            else _("%(free)d of %(total)d CPUs free")
        )
        match detail.get("code"):
            case "cluster_free":
                return what % data
            case "cluster_busy" if data["waiting"]:
                waiting = ngettext("%(waiting)d job waits in Slurm", "%(waiting)d jobs wait in Slurm", data["waiting"])
                return f"{what % data}; {waiting % data}"
            case "cluster_busy":
                return what % data
            case "image_not_supported":
                return _("Runs with an image need hosts with Docker or Podman.")
            case "partition_down":
                return _("The partition takes no jobs.")
        return super().offer_detail(detail)

    def wait_reason(self, code: str) -> str:
        why = WAITS.get(code) or next((text for start, text in LIMITS.items() if code.startswith(start)), None)
        if why is None:
            return _("Slurm keeps it waiting: %s") % code
        return _("Slurm keeps it waiting: %(why)s (%(code)s)") % {"why": why, "code": code}

    def test_connection(self, config: Mapping[str, Any], secret: str) -> ConnectionReport:
        """Ask for the partitions. Changes nothing."""
        commands = Commands(config.get("ssh_host") or "", config.get("ssh_key_file") or "")
        if shares_servers_user(commands):
            return _report([ReportLine(_("Jobs' user"), "failed", "✗", OWN_USER)])
        try:
            known = commands.run("sinfo", "--noheader", "--format=%R").split()
        except SourceFailed as error:
            return _report(
                [ReportLine(_("Slurm"), "failed", "✗", self.source_failure({"code": error.code, **error.data}))]
            )
        except CommandFailed as error:
            return _report([ReportLine(_("Slurm"), "failed", "✗", error.text)])
        return _report([_partition(name, known) for name in config["partitions"]])


def _partition(name: str, known: Sequence[str]) -> ReportLine:
    if name in known:
        return ReportLine(name, "ok", "✓", _("found"))
    there = ", ".join(sorted(set(known))) or _("none")
    return ReportLine(name, "failed", "✗", _("no such partition"), _("Partitions there: %s.") % there)


def _report(lines: Sequence[ReportLine]) -> ConnectionReport:
    state = "failed" if any(line.state == "failed" for line in lines) else "ok"
    summary = _("Slurm answers.") if state == "ok" else _("This cannot be used as it is.")
    return ConnectionReport(state, summary, (ReportPart(_("Partitions"), tuple(lines), state),))
