"""Reading the audit log: filters, pages and export."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Q, QuerySet

from dstackweb.accounts.models import Project
from dstackweb.audit.models import AuditEntry

COLUMNS = ("at", "actor", "via", "address", "kind", "action", "name", "project", "changes")
CHUNK = 1000
SEARCHED = 400
"""Characters of a text that is searched for: more than any name has. SQLite refuses very long ones."""


@dataclass(frozen=True)
class AuditFilter:
    """Which entries; empty fields mean all. `text` is part of a name, actor or address, of any case."""

    project: Project | None = None
    kind: str = ""
    actor: str = ""
    text: str = ""
    since: dt.datetime | None = None
    until: dt.datetime | None = None

    def rows(self) -> QuerySet[AuditEntry]:
        """The newest first."""
        wanted = {
            "project_id": self.project and self.project.pk, "kind": self.kind, "actor_name": self.actor,
            "at__gte": self.since, "at__lt": self.until,
        }  # fmt: skip
        found = AuditEntry.objects.order_by("-id").filter(**{name: value for name, value in wanted.items() if value})
        if self.text:
            text = self.text[:SEARCHED]
            found = found.filter(Q(name__icontains=text) | Q(actor_name__icontains=text) | Q(address__icontains=text))
        return found


def page(wanted: AuditFilter, limit: int, before: int | None = None) -> tuple[Sequence[AuditEntry], int | None]:
    """Up to `limit` entries older than the id `before`, and the id to go on before, None at the end."""
    rows = wanted.rows() if before is None else wanted.rows().filter(pk__lt=before)
    found = list(rows[: limit + 1])
    return found[:limit], found[limit - 1].pk if len(found) > limit else None


def every(wanted: AuditFilter) -> Iterator[dict[str, Any]]:
    """All entries of a filter, with COLUMNS, read page by page.

    A cursor of the database would be open until a reader who left is noticed. Closed by the garbage collection in the
    middle of another query, it waits for that query, which waits for it.
    """
    before: int | None = None
    while True:
        entries, before = page(wanted, CHUNK, before)
        yield from map(facts, entries)
        if before is None:
            return


def facts(entry: AuditEntry) -> dict[str, Any]:
    """An entry as the API and the export show it."""
    return {
        "at": entry.at.isoformat().replace("+00:00", "Z"),
        "actor": entry.actor_name,
        "via": entry.via or None,
        "address": entry.address,
        "kind": entry.kind,
        "action": entry.action,
        "name": entry.name,
        "project": entry.project_name or None,
        "changes": entry.changes,
    }
