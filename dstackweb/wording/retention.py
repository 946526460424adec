"""What is pruned when it is old, in words."""

from __future__ import annotations

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.scheduler.models import RetentionKind
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
