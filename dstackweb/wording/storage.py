"""What is pruned when it is old, and why a file that a job left was not kept."""

from __future__ import annotations

from typing import assert_never

from django.conf import settings
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.runner.limits import ArtifactLeft
from dstackweb.runs.artifacts import MOST_FILES, limit_of
from dstackweb.scheduler.models import RetentionKind
from dstackweb.wording import units
from dstackweb.wording.sentence import words

kind = words(
    {
        RetentionKind.RUNS: gettext_lazy("ended runs"),
        RetentionKind.LOGS: gettext_lazy("logs of ended runs"),
        RetentionKind.ARTIFACTS: gettext_lazy("artifacts of ended runs"),
        RetentionKind.ARCHIVES: gettext_lazy("unused code"),
        RetentionKind.TASKS: gettext_lazy("tasks of ended attempts"),
        RetentionKind.AVERAGES: gettext_lazy("averages of GPU samples"),
        RetentionKind.HISTORY: gettext_lazy("hours of queue history"),
        RetentionKind.QUEUE_PAST: gettext_lazy("places in queues and wait reasons"),
        RetentionKind.HOST_EVENTS: gettext_lazy("events of hosts"),
        RetentionKind.AUDIT: gettext_lazy("entries of the audit log"),
        RetentionKind.NOTIFICATIONS: gettext_lazy("notifications"),
        RetentionKind.PROJECTS: gettext_lazy("runs of deleted projects"),
        RetentionKind.LEFTOVERS: gettext_lazy("leftovers of removed runs and code"),
        RetentionKind.RUN_DIRS: gettext_lazy("run directories"),
        RetentionKind.JOB_FILES: gettext_lazy("runner files of ended jobs"),
    }
)
"""What is pruned."""


def waiting(of: str, host: str, number: int) -> str:
    """How much of one kind waits: "12 run directories on gpu-1"."""
    values = {"number": number, "what": kind(of), "host": host}
    return (_("%(number)d %(what)s on %(host)s") if host else _("%(number)d %(what)s")) % values


def left_out(why: str) -> str:
    """The reason, as the end of a line: "over the limit of 512 MB for a file"."""
    try:
        code = ArtifactLeft(why)
    except ValueError:
        return why
    match code:
        case ArtifactLeft.NAME:
            return _("its name can't be kept: too long, not UTF-8, or with unsafe characters")
        case ArtifactLeft.KIND:
            return _("not a plain file")
        case ArtifactLeft.UNREADABLE:
            return _("could not be read")
        case ArtifactLeft.CHANGED:
            return _("changed while it was sent")
        case ArtifactLeft.TOO_MANY:
            return _("over the limit of %d files for a run") % MOST_FILES
        case ArtifactLeft.TIME:
            return _("not sent in time")
        case ArtifactLeft.UNFINISHED:
            return _("not sent to its end, since its runner was lost")
        case ArtifactLeft.FILE_LIMIT:
            return _("over the limit of %s for a file") % units.size(limit_of(code))
        case ArtifactLeft.RUN_LIMIT:
            return _("over the limit of %s for a run") % units.size(limit_of(code))
        case ArtifactLeft.PROJECT_QUOTA:
            quota = settings.DSTACKWEB_PROJECT_ARTIFACTS_GB
            return _("over the project's quota of %d GB for artifacts") % quota
        case _other:
            assert_never(_other)
