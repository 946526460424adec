"""What failed tasks said: a row per task, the newest of each prefix only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dstackweb.progress import bulk
from dstackweb.progress.batch import Taking
from dstackweb.progress.events import Failure
from dstackweb.progress.models import TaskFailure

KEPT = 1_000
"""Of each prefix."""

ROW = {
    "scope_id": "bigint", "prefix_id": "bigint", "key": "text", "group": "text", "message": "text", "seq": "bigint",
    "at_ms": "bigint",
}  # fmt: skip


def decide(taking: Taking, failures: Sequence[Failure]) -> list[Failure]:
    """Those that are newer than what is known of their tasks; of the others the receipt tells."""
    if not failures:
        return []
    taking.book.read({(failure.prefix, failure.group) for failure in failures})
    seqs = _rows(taking.scope.pk, {failure.key for failure in failures}, "seq")
    newest: dict[str, Failure] = {}
    for index, failure in sorted(enumerate(failures), key=lambda entry: entry[1].seq, reverse=True):
        if failure.key in newest or failure.seq <= seqs.get(failure.key, -1):
            taking.receipt.outdated += 1
        elif not taking.book.ids((failure.prefix, failure.group)).prefix and (
            reason := taking.room_for((failure.prefix, failure.group))
        ):
            taking.refuse(index, failure.key, reason, "failures")
        else:
            newest[failure.key] = failure
            taking.delta((failure.prefix, failure.group))
            taking.receipt.applied += 1
    return list(newest.values())


def write(taking: Taking, failed: Sequence[Failure], done: Collection[str]) -> None:
    """Remember what failed, forget what is done after all, and keep the newest of each prefix."""
    latest = {failure.key: failure for failure in sorted(failed, key=lambda failure: failure.seq)}
    stale = [*latest, *done]
    if stale and TaskFailure.objects.filter(scope=taking.scope).exists():
        bulk.delete("progress_taskfailure", list(_rows(taking.scope.pk, stale, "id").values()))
    rows = []
    for failure in latest.values():
        prefix = taking.book.ids((failure.prefix, failure.group)).prefix
        told = (failure.key, failure.group, failure.message, failure.seq, taking.now_ms)
        rows.append((taking.scope.pk, prefix, *told))
    bulk.insert("progress_taskfailure", ROW, rows)
    for prefix in sorted({row[1] for row in rows}):
        _trim(prefix)


def _rows(scope_id: int, keys: Collection[str], column: str) -> dict[str, int]:
    """A column of what is known of these tasks, by key."""
    found = bulk.find(
        f"t.key, t.{column}",
        "progress_taskfailure",
        "t.key = given.key AND t.scope_id = %s",
        {"key": "text"},
        [(key,) for key in keys],
        scope_id,
    )
    return dict(found)


def _trim(prefix_id: int) -> None:
    """Delete all but the newest of a prefix."""
    newest = TaskFailure.objects.filter(prefix=prefix_id).order_by("-at_ms", "-pk")
    bulk.delete("progress_taskfailure", list(newest.values_list("pk", flat=True)[KEPT:]))
