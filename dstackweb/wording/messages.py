"""What a run or a job says of its end or its start, from a stored code with data, or as an outside system said it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, assert_never

from django.utils.translation import gettext as _

from dstackweb.runs.codes import MessageCode
from dstackweb.runs.models import Run
from dstackweb.runs.rows import RunRow
from dstackweb.runs.states import Reason
from dstackweb.wording import offers, policy
from dstackweb.wording.sentence import known
from dstackweb.wording.statuses import exited, termination
from dstackweb.wording.units import duration, exact_duration

Listed = TypeVar("Listed", bound=RunRow)


def worded(row: Listed) -> Listed:
    """The row with its whole message as `status_message`."""
    row.status_message = message(row.status_detail, row.status_message)
    return row


def of(run: Run) -> str:
    """The whole message of a run."""
    return message(run.status_detail, run.status_message)


def message(detail: Mapping[str, Any], text: str) -> str:
    """The whole message; `text` is what a program, a cloud or a person said."""
    code = known(MessageCode, str(detail.get("code", "")))
    return text if code is None else _message(code, dict(detail), text)


def beyond_reason(detail: Mapping[str, Any], text: str) -> str:
    """What the message adds to the reason of the end and the exit code, which are shown before it."""
    match detail.get("code"):
        case MessageCode.EXITED:
            return ""
        case MessageCode.OUT_OF_CAPACITY:
            return text
    return message(detail, text)


def _message(code: MessageCode, data: dict[str, Any], text: str) -> str:
    match code:
        case MessageCode.EXITED:
            return exited(int(data["exit_code"]))
        case MessageCode.OUT_OF_CAPACITY:
            return f"{termination(Reason.OUT_OF_CAPACITY)} {text}".strip()
        case MessageCode.LOW_UTILIZATION:
            return f"{policy.was_low(data)}."
        case MessageCode.LATE:
            late = _("it did not start within %s") % exact_duration(int(data["deadline_s"]))
            cause = message(data.get("cause", {}), text)
            return f"{late}: {cause}" if cause else late
        case MessageCode.HOST_SILENT:
            numbers = {"host": data["host"], "time": duration(data["silent_s"])}
            return _("%(host)s has sent no heartbeat for %(time)s") % numbers
        case MessageCode.RUNNER_GONE:
            return _("its runner and its state are gone from the host")
        case MessageCode.GIVEN_UP:
            return _("an operator gave it up: its host is gone")
        case MessageCode.NO_GPUS:
            told = _("%(instance_type)s shows %(seen)d of its %(total)d GPUs: its image needs the NVIDIA driver")
            return told % data
        case MessageCode.SOURCE_FAILED:
            return offers.failure(data["kind"], data["error"])
        case never:
            assert_never(never)
