"""Statuses and why runs, jobs and cloud instances ended. An unknown code is shown as it is: a newer server wrote it."""

from __future__ import annotations

from typing import NamedTuple

from django.utils.translation import gettext as _


class Label(NamedTuple):
    """A short word for a badge, a sentence for beside it, and a tone: `go`, `wait`, `bad` or `info`."""

    label: str
    text: str
    tone: str = "wait"


def status(code: str) -> str:
    """A run's or job's status; dstack's own words, which the API and the command line use as well."""
    return {
        "pending": _("pending"),
        "submitted": _("submitted"),
        "provisioning": _("provisioning"),
        "running": _("running"),
        "terminating": _("terminating"),
        "done": _("done"),
        "failed": _("failed"),
        "terminated": _("terminated"),
    }.get(code, code)


def termination(code: str) -> str:
    """Why a run or a job ended, as a sentence."""
    return {
        "all_jobs_done": _("All commands finished."),
        "job_failed": _("A job failed."),
        "stopped_by_user": _("Stopped by a member."),
        "aborted_by_user": _("Aborted by a member."),
        "retry_limit_exceeded": _("It failed again after the time for retries had passed."),
        "server_error": _("The server could not go on with it."),
        "done_by_runner": _("All commands finished."),
        "container_exited_with_error": _("A command failed."),
        "terminated_by_user": _("Stopped by a member."),
        "terminated_by_server": _("Stopped because another node of the run ended."),
        "max_duration_exceeded": _("It ran longer than its max_duration."),
        "executor_error": _("Its runner failed."),
        "instance_unreachable": _("It was interrupted: its host or its runner went away."),
        "failed_to_start_due_to_no_capacity": _("It could not be started on its host in time."),
        "out_of_capacity": _("No cloud had a machine for it."),
        "interrupted_by_no_capacity": _("It was interrupted: the cloud took its spot machine back."),
        "creating_container_error": _("Its container could not be created."),
        "log_quota_exceeded": _("It wrote more log than is allowed."),
        "hold_ended": _("Held for its time, and given back."),
        "given_back": _("Given back before its time was over."),
        "terminated_due_to_utilization_policy": _("Stopped by the utilization policy: its GPUs were not used enough."),
    }.get(code, code)


def no_machine(code: str) -> str:
    """Why a cloud's machine was not to be had, or has ended, after its name and a colon."""
    return {
        "no_capacity": _("the cloud has none now"),
        "quota": _("the account's quota is used up"),
        "spot_price": _("spot machines cost more than is paid for them now"),
        "not_allowed": _("the backend's credentials don't allow it"),
        "ami": _("there is no image for it"),
        "network": _("its network can't be used"),
        "refused": _("the cloud refused"),
        "not_started": _("it did not come up in time"),
        "no_gpus": _("it shows fewer GPUs than it has; its image needs NVIDIA's driver"),
        "interrupted": _("the cloud took it back"),
        "cloud": _("it ended by itself, or somebody ended it at the cloud"),
        "unreachable": _("the cloud could not be asked"),
        "silent": _("it has not called for too long"),
        "overdue": _("its job did not stop in time"),
        "finished": _("its work is done"),
        "idle": _("nothing was left for it to do"),
        "stopped": _("it was ended by hand"),
        "deleted": _("its backend was deleted"),
    }.get(code, code)


def exited(code: int) -> str:
    """An exit code, with what it usually means where it has a usual meaning."""
    usual = {
        126: _("the command can't be executed"),
        127: _("command not found"),
        130: _("interrupted"),
        137: _("killed; often out of memory"),
        139: _("crashed: segmentation fault"),
        143: _("terminated"),
    }.get(code)
    text = _("Exit code %d") % code
    return f"{text}: {usual}." if usual else f"{text}."
