"""What people call the states of tasks, and what each means."""

from __future__ import annotations

from django.utils.translation import gettext as _

from dstackweb.progress.states import TaskState


def state(code: str) -> str:
    """One word for a state; an unknown code is shown as it is."""
    return {
        "memory": _("done"),
        "erred": _("failed"),
        "released": _("released"),
        "processing": _("running"),
        "queued": _("queued"),
        "no_worker": _("no worker"),
        "waiting": _("waiting"),
        "forgotten": _("forgotten"),
    }.get(code, code)


def meaning(code: TaskState) -> str:
    """A sentence on what it says of a task."""
    return {
        TaskState.MEMORY: _("It has finished, and its result is there."),
        TaskState.ERRED: _("It has failed."),
        TaskState.RELEASED: _("Nothing more is to come of it: it was stopped, or its result is no longer needed."),
        TaskState.PROCESSING: _("It is being worked on."),
        TaskState.QUEUED: _("It could start, and waits for its turn."),
        TaskState.NO_WORKER: _("It could start, but nothing there can run it."),
        TaskState.WAITING: _("It waits for others to finish first."),
        TaskState.FORGOTTEN: _("It has finished, and who reported it has dropped it; it still counts."),
    }[code]
