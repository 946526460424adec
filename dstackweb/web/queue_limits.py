"""The limits of a queue with what is used of them: tags on its page, bars on its settings."""

from __future__ import annotations

from typing import NamedTuple

from django.utils.translation import gettext as _

from dstackweb.accounts.models import User
from dstackweb.runs.models import Allocation, Queue, Run
from dstackweb.runs.states import PLACED
from dstackweb.web.queue_words import setting


class Limit(NamedTuple):
    """One limit: `most` None is none. `text` is short, `label` says what is counted."""

    name: str
    used: int
    most: int | None
    text: str

    @property
    def label(self) -> str:
        """What the setting is called."""
        return setting(self.name)

    @property
    def full(self) -> bool:
        """Whether nothing more starts because of it."""
        return self.most is not None and self.used >= self.most


def limits(queue: Queue, user: User, placed: int, gpus: int) -> list[Limit]:
    """Those that are set. `placed` runs of the queue hold `gpus`; the reader's own are counted where it matters."""
    found = [_limit("max_running", placed, queue.max_running), _limit("max_gpus", gpus, queue.max_gpus)]
    if queue.max_running_per_user is not None:
        found.append(_limit("max_running_per_user", _placed(queue, user), queue.max_running_per_user))
    if queue.max_gpus_per_user is not None:
        found.append(_limit("max_gpus_per_user", _gpus(queue, user), queue.max_gpus_per_user))
    return [limit for limit in found if limit.most is not None]


def usage(queue: Queue, user: User) -> list[Limit]:
    """All four, whether they are set or not; those per member with what the reader uses."""
    return [
        _limit("max_running", _placed(queue), queue.max_running),
        _limit("max_gpus", _gpus(queue), queue.max_gpus),
        _limit("max_running_per_user", _placed(queue, user), queue.max_running_per_user),
        _limit("max_gpus_per_user", _gpus(queue, user), queue.max_gpus_per_user),
    ]


def _placed(queue: Queue, user: User | None = None) -> int:
    runs = Run.objects.filter(queue=queue, status__in=PLACED)
    return (runs.filter(user=user) if user else runs).count()


def _gpus(queue: Queue, user: User | None = None) -> int:
    held = Allocation.objects.filter(job__run__queue=queue, gpu__isnull=False)
    return (held.filter(job__run__user=user) if user else held).count()


def _limit(name: str, used: int, most: int | None) -> Limit:
    pattern = {
        "max_running": _("%(used)d of %(most)d running"),
        "max_gpus": _("%(used)d of %(most)d GPUs"),
        "max_running_per_user": _("%(used)d of your %(most)d running"),
        "max_gpus_per_user": _("%(used)d of your %(most)d GPUs"),
    }[name]
    return Limit(name, used, most, pattern % {"used": used, "most": most} if most is not None else str(used))
