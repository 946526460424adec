"""The codes of a run file's settings. They are stored and served; `dstackweb.wording` turns them into sentences."""

from __future__ import annotations

from enum import StrEnum


class RunType(StrEnum):
    """What a run file is for: commands that end by themselves, a place to work in, or a server that others call."""

    TASK = "task"
    DEV_ENVIRONMENT = "dev-environment"
    SERVICE = "service"


class Ide(StrEnum):
    """What a dev environment is used with, beside a terminal."""

    VSCODE = "vscode"
    JUPYTER = "jupyter"


class UtilizationAction(StrEnum):
    """What a utilization policy does about a run that stays below its minimum."""

    TERMINATE = "terminate"
    NOTIFY = "notify"


class UtilizationScope(StrEnum):
    """Which of a job's GPUs must stay below the minimum."""

    ANY = "any"
    ALL = "all"


class On(StrEnum):
    """How a run must end so that the runs after it start."""

    DONE = "done"
    FAILED = "failed"
    """In any other way than done."""
    ENDED = "ended"


class Otherwise(StrEnum):
    """What happens to a run when a run before it ended differently."""

    CANCEL = "cancel"
    KEEP = "keep"
