"""A queue's limits and their usage: tags on its page, bars on its settings."""

from __future__ import annotations

from typing import NamedTuple

from django.utils.translation import gettext as _

from dstackweb.accounts.models import User
from dstackweb.runs.models import Queue
from dstackweb.scheduler.placement.limits import QueueUsage
from dstackweb.wording.queue import setting


class Limit(NamedTuple):
    """One limit and its usage; `most` None means no limit."""

    name: str
    used: int
    most: int | None
    text: str

    @property
    def label(self) -> str:
        """The name of the setting."""
        return setting(self.name)

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self.most is not None and self.used >= self.most


def usage(queue: Queue, user: User, placed: QueueUsage) -> list[Limit]:
    """All four limits, set or not; the per-member ones with the reader's usage."""
    everybody, own = (queue.pk, None), (queue.pk, user.pk)
    return [
        _limit("max_running", placed.runs[everybody], queue.max_running),
        _limit("max_gpus", placed.gpus[everybody], queue.max_gpus),
        _limit("max_running_per_user", placed.runs[own], queue.max_running_per_user),
        _limit("max_gpus_per_user", placed.gpus[own], queue.max_gpus_per_user),
    ]


def _limit(name: str, used: int, most: int | None) -> Limit:
    pattern = {
        "max_running": _("%(used)d of %(most)d running"),
        "max_gpus": _("%(used)d of %(most)d GPUs"),
        "max_running_per_user": _("you: %(used)d of %(most)d running"),
        "max_gpus_per_user": _("you: %(used)d of %(most)d GPUs"),
    }[name]
    return Limit(name, used, most, pattern % {"used": used, "most": most} if most is not None else str(used))
