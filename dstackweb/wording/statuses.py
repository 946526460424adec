"""Statuses in words, why runs, jobs and cloud instances ended, and the messages of runs and jobs."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, assert_never

from django.utils.translation import gettext, gettext_lazy as _, ngettext

from dstackweb.backends.contract import InstanceEnd
from dstackweb.runner.archive import Fault
from dstackweb.runner.engine import EngineFault
from dstackweb.runner.images import ImageFault
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.models import Run
from dstackweb.runs.row_fields import RunRow
from dstackweb.runs.run_places import SilentHost
from dstackweb.runs.states import Reason, RunStatus
from dstackweb.spec.codes import On
from dstackweb.wording import offers, policy, starts
from dstackweb.wording.places import LAUNCH_FAILURES
from dstackweb.wording.sentence import Sentence, colon, fill, known, listing, words
from dstackweb.wording.units import duration, exact_duration, mebibytes

status = words(
    {
        RunStatus.PENDING: _("pending"),
        RunStatus.SUBMITTED: _("submitted"),
        RunStatus.PROVISIONING: _("provisioning"),
        RunStatus.RUNNING: _("running"),
        RunStatus.TERMINATING: _("terminating"),
        RunStatus.DONE: _("done"),
        RunStatus.FAILED: _("failed"),
        RunStatus.TERMINATED: _("terminated"),
    }
)
"""A run's or job's status; dstack's own words, which the API and the command line use as well."""

termination = words(
    {
        Reason.ALL_JOBS_DONE: _("All commands finished."),
        Reason.DONE_BY_RUNNER: _("All commands finished."),
        Reason.JOB_FAILED: _("A job failed."),
        Reason.STOPPED_BY_USER: _("Stopped by a member."),
        Reason.TERMINATED_BY_USER: _("Stopped by a member."),
        Reason.ABORTED_BY_USER: _("Aborted by a member."),
        Reason.RETRY_LIMIT_EXCEEDED: _("It failed again, and its time or number of retries was used up."),
        Reason.SERVER_ERROR: _("The server failed to continue it."),
        Reason.DEPENDENCY_NOT_MET: _("A run that it depends on ended differently."),
        Reason.CONTAINER_EXITED_WITH_ERROR: _("A command failed."),
        Reason.TERMINATED_BY_SERVER: _("Stopped because another node of the run ended."),
        Reason.MAX_DURATION_EXCEEDED: _("It reached its max_duration."),
        Reason.OUT_OF_MEMORY: _("It ran out of memory."),
        Reason.OUT_OF_DISK: _("Its files took too much of the disk."),
        Reason.EXECUTOR_ERROR: _("Its runner failed."),
        Reason.CODE_REFUSED: _("Its code could not be unpacked. Nothing was executed."),
        Reason.IMAGE_PULL_FAILED: _("Its image could not be pulled. Nothing was executed."),
        Reason.INSTANCE_UNREACHABLE: _("Interrupted: its host or its runner was lost."),
        Reason.NO_CAPACITY: _("Its host did not start it in time."),
        Reason.NOT_CLAIMED: _("Its host did not start it. Nothing was executed."),
        Reason.OUT_OF_CAPACITY: _("No cloud had an instance for it."),
        Reason.INTERRUPTED: _("Interrupted: the cloud reclaimed its spot instance."),
        Reason.CREATING_CONTAINER_ERROR: _("Its container could not be created."),
        Reason.HOLD_ENDED: _("Its hold ended on time."),
        Reason.GIVEN_BACK: _("Released before its hold ended."),
        Reason.PREEMPTED: _("Displaced by another run; queued again."),
        Reason.INACTIVITY: _("Stopped: unused for its inactivity_duration."),
        Reason.UTILIZATION_POLICY: _("Stopped by its utilization policy: GPUs underutilized."),
    }
)
"""Why a run or a job ended, as a sentence."""

_INSTANCE_STATUSES = {
    "requested": _("requested"),
    "starting": _("starting"),
    "running": _("running"),
    "idle": _("idle"),
    "stopping": _("terminating"),
    "gone": _("terminated"),
}


def instance_status(code: str) -> str:
    """A status of a cloud instance; `idle`: it runs without a job."""
    return str(_INSTANCE_STATUSES[code])


instance_end = words(
    {
        **LAUNCH_FAILURES,
        InstanceEnd.NOT_STARTED: _("it did not start in time"),
        InstanceEnd.NO_GPUS: _("it shows fewer GPUs than it has; its image needs the NVIDIA driver"),
        InstanceEnd.INTERRUPTED: _("the cloud reclaimed it"),
        InstanceEnd.CLOUD: _("it ended by itself or in the cloud's console"),
        InstanceEnd.UNREACHABLE: _("the cloud could not be reached"),
        InstanceEnd.SILENT: _("it has sent no heartbeat for too long"),
        InstanceEnd.OVERDUE: _("its job did not stop in time"),
        InstanceEnd.FINISHED: _("its job ended"),
        InstanceEnd.IDLE: _("it was idle"),
        InstanceEnd.STOPPED: _("a member stopped it"),
        InstanceEnd.DELETED: _("its backend was deleted"),
        InstanceEnd.DISABLED: _("its backend was disabled"),
    }
)
"""Why a cloud instance could not be launched, or has ended, to follow its name and a colon."""


SIGNALS = {int(one): one.name for one in signal.Signals}
EXIT_CODES: dict[int, Any] = {
    126: _("the command cannot be executed"),
    127: _("command not found"),
    130: _("interrupted"),
    137: _("killed; often out of memory"),
    139: _("crashed: segmentation fault"),
    143: _("terminated"),
}


def exited(code: int) -> str:
    """An exit code, with its usual meaning if it has one."""
    usual = str(EXIT_CODES.get(code, ""))
    if not usual and code - 128 in SIGNALS:
        usual = _("killed by %s") % SIGNALS[code - 128]
    text = _("Exit code %d") % code
    return (colon(text, usual) if usual else text) + _(".")


Listed = TypeVar("Listed", bound=RunRow)


def worded(rows: Sequence[Listed]) -> Sequence[Listed]:
    """The rows with what `run_message` says of them as `status_message`, and what their start rests on."""
    for row in rows:
        row.status_message = run_message(row)
    starts.add_words((row.starts, row.start_data) for row in rows if row.starts is not None)
    return rows


def run_message(run: Run | RunRow) -> str:
    """The whole message of a run, or why it ended unless it is done."""
    text = message(run.status_detail, run.status_message) if run.status_detail else run.status_message
    if text or run.status not in (RunStatus.FAILED, RunStatus.TERMINATED):
        return text
    return str(termination(run.termination_reason) or "")


def silent(run: Run, hosts: Sequence[SilentHost]) -> Sentence:
    """What a placed run waits for while hosts of it are silent; empty if none is."""
    if not hosts:
        return Sentence("")
    names, stopping = listing(one.host for one in hosts), run.status == RunStatus.TERMINATING
    template = gettext("No heartbeat from %(hosts)s: what the run does there is unknown.")
    if stopping:
        template = gettext("Waits for %(hosts)s, which is silent: its processes may still be running there.")
    text = fill(template, hosts=names)
    if (seen := min((one.seen_at for one in hosts if one.seen_at), default=None)) is not None:
        text += fill(gettext(" Last heartbeat at %(at)s."), at=seen)
    if stopping:
        text += fill(gettext(" It ends once the host answers, or once an admin declares on its page that it is gone."))
    return text


def message(detail: Mapping[str, Any], text: str) -> str:
    """The whole message; `text` is what a program, a cloud or a person said."""
    code = known(MessageCode, str(detail.get("code", "")))
    if code is None:
        return text
    found = _message(code, dict(detail), text)
    if "failed_node" in detail:
        return str(_("Node %(node)d: %(message)s") % {"node": detail["failed_node"], "message": found})
    return found


def beyond_reason(detail: Mapping[str, Any], text: str) -> str:
    """What the message adds to the reason of the end and the exit code, which are shown before it."""
    match detail.get("code"):
        case MessageCode.EXITED:
            return ""
        case MessageCode.OUT_OF_CAPACITY:
            return text
    return message(detail, text)


def out_of_memory(limit_mib: int | None) -> str:
    if limit_mib is None:
        return str(_("The memory of its machine was used up. Ask for more with resources.memory."))
    text = _("It needed more than its limit of %s. Ask for more with resources.memory.")
    return text % mebibytes(limit_mib)


def out_of_disk(data: Mapping[str, Any]) -> str:
    """Sizes are in bytes."""
    used, limit, free, reserve = (
        mebibytes((data.get(name) or 0) >> 20) for name in ("used", "limit", "free", "reserve")
    )
    if data.get("reserve"):
        text = _("Its host has %(free)s free, and jobs must leave %(reserve)s (DSTACKWEB_DISK_RESERVE_GB).")
        return str(text % {"free": free, "reserve": reserve})
    if data.get("inode_reserve"):
        text = _(
            "Its host's disk has room for %(free)s more files, and jobs must leave room for %(reserve)s "
            "(DSTACKWEB_INODE_RESERVE_PERCENT)."
        )
        return str(text % {"free": f"{data['free_inodes'] or 0:,}", "reserve": f"{data['inode_reserve']:,}"})
    if data.get("used") is None:
        return str(_("Its folders are nested too deep to be counted."))
    text = _("Its files take %(used)s; a job may have %(limit)s (DSTACKWEB_JOB_DISK_GB).")
    return str(text % {"used": used, "limit": limit})


_CODE_REFUSED = words(
    {
        Fault.BROKEN: _("Its code is not a complete .tar.gz file."),
        Fault.OUTSIDE: _("%(name)s in its code is outside the code's folder."),
        Fault.LINK_OUTSIDE: _("The link %(name)s in its code leads outside the code's folder."),
        Fault.KIND: _("%(name)s in its code is neither a plain file nor a folder nor a link to one."),
        Fault.CLASH: _("%(name)s is in its code twice, as different things."),
        Fault.TOO_LARGE: _("Its code takes more than %(size)s when unpacked."),
        Fault.TOO_MANY: _("Its code has more than %(limit)s files and folders."),
        Fault.TOO_LONG: _("The path %(name)s in its code is too long or has too many folders."),
    }
)


def code_refused(data: Mapping[str, Any]) -> str:
    """What is wrong with a run's code, and what to do."""
    fault = known(Fault, str(data.get("fault", "")))
    text = gettext("Its host refused its code.") if fault is None else _CODE_REFUSED(fault.value)
    limit = int(data.get("limit") or 0)
    values = {"name": data.get("name") or "?", "limit": f"{limit:,}", "size": mebibytes(limit >> 20)}
    return text % values + " " + gettext("Change it and submit the run again.")


def after(data: Mapping[str, Any]) -> str:
    """Which runs a run waits for, or which ended so that it can't start by itself."""
    if unmet := data.get("unmet"):
        return listing(str(_UNMET(one["on"]) % one) for one in unmet) + _(".")
    waits = data.get("waits", ())
    named = [str(_AWAITED(one["on"]) % one) for one in waits[:MOST_NAMED]]
    if more := len(waits) - len(named):
        named.append(ngettext("%d more", "%d more", more) % more)
    return str(_("Enters its queue after: %s.") % listing(named))


MOST_NAMED = 5
_AWAITED = words(
    {
        On.DONE: _("%(name)s is done"),
        On.FAILED: _("%(name)s has failed"),
        On.ENDED: _("%(name)s has ended"),
    }
)
_UNMET = words(
    {
        On.DONE: _("%(name)s did not end as done"),
        On.FAILED: _("%(name)s did not fail"),
        On.ENDED: _("%(name)s was removed"),
    }
)


_IMAGE_FAULTS = words(
    {
        ImageFault.NOT_FOUND: _("The registry has no image %s. Check its name and tag."),
        ImageFault.DENIED: _(
            "The registry refused to give out the image %s. Check registry_auth, or whether it exists."
        ),
        ImageFault.NO_SPACE: _("The disk of its host has no room for the image %s."),
        ImageFault.UNREACHABLE: _("Its host can't reach the registry of the image %s."),
        ImageFault.NOT_PRESENT: _("Its host does not have the image %s, and pull_policy is never."),
        ImageFault.FAILED: _("The image %s could not be pulled."),
    }
)


def image_pull_failed(data: Mapping[str, Any]) -> str:
    """Why an image could not be pulled, and what to do."""
    fault = known(ImageFault, str(data.get("fault", ""))) or ImageFault.FAILED
    return _IMAGE_FAULTS(fault.value) % str(data.get("image", "?"))


_ENGINE_FAULTS = words(
    {
        EngineFault.INSTALL_FAILED: _(
            "Docker could not be installed on its instance. Use a machine image that has it."
        ),
        EngineFault.NOT_ROOT: _("Its instance has no Docker, and its agent may not install it."),
        EngineFault.NO_GPU_TOOLKIT: _(
            "The machine image of its instance lacks NVIDIA's container toolkit. Use one that has it."
        ),
    }
)


def no_engine(data: Mapping[str, Any]) -> str:
    """Why an instance can't run a container, and what to do."""
    fault = known(EngineFault, str(data.get("fault", "")))
    return gettext("Its instance cannot run containers.") if fault is None else _ENGINE_FAULTS(fault.value)


def _message(code: MessageCode, data: dict[str, Any], text: str) -> str:
    match code:
        case MessageCode.EXITED:
            return exited(int(data["exit_code"]))
        case MessageCode.OUT_OF_MEMORY:
            return out_of_memory(data.get("memory_mib"))
        case MessageCode.OUT_OF_DISK:
            return out_of_disk(data)
        case MessageCode.CODE_REFUSED:
            return code_refused(data)
        case MessageCode.IMAGE_PULL_FAILED:
            return " ".join(filter(None, [image_pull_failed(data), text]))
        case MessageCode.OUT_OF_CAPACITY:
            return f"{termination(Reason.OUT_OF_CAPACITY)} {text}".strip()
        case MessageCode.AFTER:
            return after(data)
        case MessageCode.LOW_UTILIZATION:
            return policy.was_low(data) + _(".")
        case MessageCode.LATE:
            late = _("it did not start within %s") % exact_duration(int(data["deadline_s"]))
            cause = message(data.get("cause", {}), text)
            return colon(late, cause) if cause else late
        case MessageCode.HOST_SILENT:
            numbers = {"host": data["host"], "time": duration(data["silent_s"])}
            return _("%(host)s has sent no heartbeat for %(time)s") % numbers
        case MessageCode.RUNNER_GONE:
            return str(_("its runner and its state are gone from the host"))
        case MessageCode.MACHINE_ASKED:
            ended = _("a signal ended its commands (exit code %(exit_code)d); asking the cloud about its machine")
            return ended % data
        case MessageCode.MACHINE_SHUT_DOWN:
            return _("its machine was shut down while it ran (exit code %(exit_code)d)") % data
        case MessageCode.GIVEN_UP:
            if "by" not in data:
                return str(_("an operator gave it up: its host is gone"))
            return _("%(by)s declared that %(host)s is gone: %(reason)s") % data
        case MessageCode.NO_GPUS:
            shows = _("%(instance_type)s shows %(seen)d of its %(total)d GPUs: its image needs the NVIDIA driver")
            return shows % data
        case MessageCode.INSTALLING_ENGINE:
            return str(_("Docker is being installed on its instance"))
        case MessageCode.NO_ENGINE:
            return " ".join(filter(None, [no_engine(data), text]))
        case MessageCode.SOURCE_FAILED:
            return offers.failure(data["kind"], data["error"])
        case MessageCode.ENGINE_WAITS:
            return offers.engine_wait(data["kind"], data["waits_for"])
        case never:
            assert_never(never)
