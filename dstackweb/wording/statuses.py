"""Statuses, and why runs, jobs and cloud instances ended. A code that this version doesn't know is shown as it is."""

from __future__ import annotations

import signal
from typing import assert_never

from django.utils.translation import gettext as _

from dstackweb.backends.contract import InstanceEnd, LaunchFailure
from dstackweb.runs.states import Reason, RunStatus
from dstackweb.wording.sentence import known


def status(code: str) -> str:
    """A run's or job's status; dstack's own words, which the API and the command line use as well."""
    found = known(RunStatus, code)
    match found:
        case RunStatus.PENDING:
            return _("pending")
        case RunStatus.SUBMITTED:
            return _("submitted")
        case RunStatus.PROVISIONING:
            return _("provisioning")
        case RunStatus.RUNNING:
            return _("running")
        case RunStatus.TERMINATING:
            return _("terminating")
        case RunStatus.DONE:
            return _("done")
        case RunStatus.FAILED:
            return _("failed")
        case RunStatus.TERMINATED:
            return _("terminated")
        case None:
            return code
        case never:
            assert_never(never)


def termination(code: str) -> str:
    """Why a run or a job ended, as a sentence."""
    found = known(Reason, code)
    return code if found is None else _termination(found)


def _termination(reason: Reason) -> str:
    match reason:
        case Reason.ALL_JOBS_DONE | Reason.DONE_BY_RUNNER:
            return _("All commands finished.")
        case Reason.JOB_FAILED:
            return _("A job failed.")
        case Reason.STOPPED_BY_USER | Reason.TERMINATED_BY_USER:
            return _("Stopped by a member.")
        case Reason.ABORTED_BY_USER:
            return _("Aborted by a member.")
        case Reason.RETRY_LIMIT_EXCEEDED:
            return _("It failed again after the time for retries was over.")
        case Reason.SERVER_ERROR:
            return _("The server failed to continue it.")
        case Reason.CONTAINER_EXITED_WITH_ERROR:
            return _("A command failed.")
        case Reason.TERMINATED_BY_SERVER:
            return _("Stopped because another node of the run ended.")
        case Reason.MAX_DURATION_EXCEEDED:
            return _("It reached its max_duration.")
        case Reason.EXECUTOR_ERROR:
            return _("Its runner failed.")
        case Reason.INSTANCE_UNREACHABLE:
            return _("Interrupted: its host or its runner was lost.")
        case Reason.NO_CAPACITY:
            return _("Its host did not start it in time.")
        case Reason.OUT_OF_CAPACITY:
            return _("No cloud had an instance for it.")
        case Reason.INTERRUPTED:
            return _("Interrupted: the cloud reclaimed its spot instance.")
        case Reason.CREATING_CONTAINER_ERROR:
            return _("Its container could not be created.")
        case Reason.HOLD_ENDED:
            return _("Its hold ended on time.")
        case Reason.GIVEN_BACK:
            return _("Released before its hold ended.")
        case Reason.UTILIZATION_POLICY:
            return _("Stopped by its utilization policy: GPUs underutilized.")
        case never:
            assert_never(never)


def instance_end(code: str) -> str:
    """Why a cloud instance could not be launched, or has ended, to follow its name and a colon."""
    refused, ended = known(LaunchFailure, code), known(InstanceEnd, code)
    return _launch_failure(refused) if refused else _instance_end(ended) if ended else code


def _launch_failure(code: LaunchFailure) -> str:
    match code:
        case LaunchFailure.NO_CAPACITY:
            return _("the cloud has no capacity now")
        case LaunchFailure.QUOTA:
            return _("the account's quota is used up")
        case LaunchFailure.SPOT_PRICE:
            return _("the spot price is above the price offered")
        case LaunchFailure.NOT_ALLOWED:
            return _("the backend's credentials lack a permission")
        case LaunchFailure.AMI:
            return _("no image can be used for it")
        case LaunchFailure.NETWORK:
            return _("its network cannot be used")
        case LaunchFailure.REFUSED:
            return _("the cloud refused")
        case never:
            assert_never(never)


def _instance_end(code: InstanceEnd) -> str:
    match code:
        case InstanceEnd.NOT_STARTED:
            return _("it did not start in time")
        case InstanceEnd.NO_GPUS:
            return _("it shows fewer GPUs than it has; its image needs the NVIDIA driver")
        case InstanceEnd.INTERRUPTED:
            return _("the cloud reclaimed it")
        case InstanceEnd.CLOUD:
            return _("it ended by itself or in the cloud's console")
        case InstanceEnd.UNREACHABLE:
            return _("the cloud could not be reached")
        case InstanceEnd.SILENT:
            return _("it has sent no heartbeat for too long")
        case InstanceEnd.OVERDUE:
            return _("its job did not stop in time")
        case InstanceEnd.FINISHED:
            return _("its job ended")
        case InstanceEnd.IDLE:
            return _("it was idle")
        case InstanceEnd.STOPPED:
            return _("somebody stopped it")
        case InstanceEnd.DELETED:
            return _("its backend was deleted")
        case never:
            assert_never(never)


SIGNALS = {int(one): one.name for one in signal.Signals}


def exited(code: int) -> str:
    """An exit code, with what it usually means where it has a usual meaning."""
    usual = {
        126: _("the command cannot be executed"),
        127: _("command not found"),
        130: _("interrupted"),
        137: _("killed; often out of memory"),
        139: _("crashed: segmentation fault"),
        143: _("terminated"),
    }.get(code)
    if usual is None and code - 128 in SIGNALS:
        usual = _("killed by %s") % SIGNALS[code - 128]
    text = _("Exit code %d") % code
    return f"{text}: {usual}." if usual else f"{text}."
