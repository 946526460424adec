"""What a reader looks for in a queue and sees of it, in the page's address, and the reasons that many runs share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.http import QueryDict
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from dstackweb.lib.errors import Invalid
from dstackweb.lib.forms import whole_number
from dstackweb.runs import rows as run_rows, selectors
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import Queue
from dstackweb.runs.queue.folding import Folding
from dstackweb.runs.queue.listing import Match, QueueSearch, ShapeCount, find, find_all, needs_of, shape_counts
from dstackweb.runs.queue.ordering import PRIORITY_MAX
from dstackweb.runs.row_fields import QueuePageRow
from dstackweb.spec.units import Needs
from dstackweb.wording import waiting
from dstackweb.wording.units import needs_of as worded_needs

MANY = 3
"""Runs that share a reason before it is said once above the list."""
CHIPS = 6
SHAPES = 200
"""Shapes whose needs are read, the most frequent first, unless all have to be."""
GROUPINGS = ("reason", "member")
COLUMNS = {
    "reason": gettext_lazy("Wait reason"),
    "priority": gettext_lazy("Priority"),
    "needs": gettext_lazy("Needs"),
    "waiting": gettext_lazy("Waiting"),
    "starts": gettext_lazy("Starts"),
    "submitted": gettext_lazy("Submitted"),
}
"""What may be shown of each run beside its name."""
SHOWN = ("reason", "priority", "needs", "waiting", "starts")
"""The columns where none are chosen."""
ALL = "view=all"
"""Of an address without filters: the whole queue, also for readers with a default view."""
EVERY = "all"
"""All sweeps are opened."""
MOST_OPENED = 50
NAME = "name"
"""Says in an address that columns are chosen, even if it is none."""


class Filters(NamedTuple):
    """The fields of the address; empty says nothing. `reason` is a WaitReason, `needs` a code of `units.Needs`, `group`
    one of GROUPINGS, `columns` NAME and those chosen of COLUMNS, `expand` the sweeps whose runs are lines (or EVERY).
    """

    text: str = ""
    user: str = ""
    needs: str = ""
    reason: str = ""
    priority: int | None = None
    group: str = ""
    columns: tuple[str, ...] = ()
    expand: tuple[str, ...] = ()

    @classmethod
    def read(cls, query: QueryDict) -> Filters:
        lowest, group, columns = query.get("priority", ""), query.get("group", ""), query.getlist("columns")
        chosen = tuple(name for name in COLUMNS if name in columns)
        opened = {str(whole_number(one)) for one in query.getlist("expand") if one.isdecimal()}
        return cls(
            text=query.get("q", "").strip()[:100],
            user=query.get("member", "").strip(),
            needs=query.get("needs", "").strip(),
            reason=query.get("reason", ""),
            priority=min(whole_number(lowest), PRIORITY_MAX) if lowest.strip() else None,
            group=group if group in GROUPINGS else "",
            columns=(NAME, *chosen) if (chosen or NAME in columns) and chosen != SHOWN else (),
            expand=(EVERY,) if EVERY in query.getlist("expand") else tuple(sorted(opened, key=int)[:MOST_OPENED]),
        )

    @property
    def query(self) -> dict[str, str | int | tuple[str, ...]]:
        """The address's fields, without the empty ones."""
        names = ("q", "member", *self._fields[2:])
        return {name: value for name, value in zip(names, self, strict=True) if value not in ("", None, ())}

    @property
    def cleared(self) -> Filters:
        """With the columns and opened sweeps alone."""
        return Filters(columns=self.columns, expand=self.expand)

    @property
    def saved(self) -> Filters:
        """What is worth a name: sweeps end."""
        return self._replace(expand=())

    @property
    def opened(self) -> frozenset[int]:
        """The sweeps that are opened by themselves."""
        return frozenset(int(one) for one in self.expand if one != EVERY)

    @property
    def folds(self) -> bool:
        """Whether the runs of sweeps are folded; who searches by name looks for single ones."""
        return EVERY not in self.expand and not self.text

    def toggled(self, sweep_id: int) -> Filters:
        """With this sweep opened, or closed again."""
        return self._replace(expand=tuple(map(str, sorted(self.opened ^ {sweep_id}))))

    @property
    def arranges(self) -> bool:
        """Whether the list is anything but the whole queue in its order."""
        return self != self.cleared

    @property
    def narrows(self) -> bool:
        """Whether some runs may be left out."""
        return self._replace(group="").arranges

    @property
    def beyond_text(self) -> bool:
        """Whether anything but the search by name is set."""
        return self._replace(text="").arranges

    @property
    def shown(self) -> dict[str, bool]:
        """The columns that are shown."""
        return dict.fromkeys(self.columns[1:] if self.columns else SHOWN, True)

    def address(self, **more: str | int) -> str:
        """`?…` with these filters and `more`; nothing where there are none."""
        fields = {**self.query, **more}
        return "?" + urlencode(fields, doseq=True) if fields else ""


def worth_saving(query: str) -> str:
    """The part of an address's query that is worth a name, as `Filters` writes it. Raises Invalid if there is none."""
    filters = Filters.read(QueryDict(query)).saved
    if not filters.query:
        raise Invalid.at("query", msg=_("a view needs a filter, groups or columns"))
    return filters.address().removeprefix("?")


class Chip(NamedTuple):
    """So many waiting runs share a reason; `text` says it, `address` shows only them, `chosen` if it does now."""

    text: str
    address: str
    chosen: bool


class Field(NamedTuple):
    """A list of the form: its name in the address, its label, what it offers as (value, text), and what is chosen."""

    name: str
    label: str
    options: Sequence[tuple[str, str]]
    chosen: str


class Page(NamedTuple):
    """The rows of a page, how many runs match in all and on how many lines, the headings of groups by the run that they
    stand above, and for how many runs each row stands."""

    rows: list[QueuePageRow]
    total: int
    lines: int
    headings: Mapping[int, str]
    stands_for: Mapping[int, int]


class Front(NamedTuple):
    """The shapes that wait at the front of a queue: what their runs need (as codes), why they wait, whose they are."""

    counts: Sequence[ShapeCount]
    needs: Mapping[str, str]
    reasons: Mapping[str, tuple[str, dict[str, Any]]]
    members: Mapping[int, str]

    @classmethod
    def read(cls, queue: Queue, filters: Filters) -> Front:
        counts = shape_counts(queue)
        if not counts:
            return cls([], {}, {}, {})
        reasons = selectors.wait_reasons(queue, {count.shape for count in counts})
        every = bool(filters.needs) or filters.group == "reason"
        wanted = {count.run_id: count.shape for count in (counts if every else counts[:SHAPES])}
        specs = needs_of(wanted)
        found = {shape: Needs.of(specs[run_id]).code for run_id, shape in wanted.items() if run_id in specs}
        return cls(counts, found, reasons, {count.user_id: count.user for count in counts})

    def page(self, queue: Queue, filters: Filters, limit: int, offset: int, folding: Folding | None) -> Page:
        """A page of the runs that match, by group if there is one, else in true order."""
        if not filters.group and folding is None:
            found, total = find(queue, self._search(filters), limit, offset)
            rows = run_rows.queue_rows_at(queue, found, self.reasons, kind=QueuePageRow)
            return Page(rows, total, total, {}, {})
        matches, sizes = self._matches(queue, filters)
        by_id = {match.run_id: match for match in matches}
        lines = dict.fromkeys(by_id, 1) if folding is None else folding.lines_of(by_id)
        shown = {run_id: by_id[run_id] for run_id in list(lines)[offset : offset + limit]}
        positions = {run_id: match.position for run_id, match in shown.items()}
        rows = run_rows.queue_rows_at(queue, positions, self.reasons, kind=QueuePageRow)
        headings = self._headings(rows, shown, sizes, filters) if filters.group else {}
        return Page(rows, len(matches), len(lines), headings, lines)

    def positions(self, queue: Queue, filters: Filters, limit: int, offset: int) -> dict[int, int]:
        """A page of the runs that match, by group if there is one: their positions in the queue by id."""
        if not filters.group:
            return find(queue, self._search(filters), limit, offset)[0]
        matches, _sizes = self._matches(queue, filters)
        return {match.run_id: match.position for match in matches[offset : offset + limit]}

    def _matches(self, queue: Queue, filters: Filters) -> tuple[list[Match], Counter[tuple[str, str]]]:
        """The runs that match, those of the largest group first, and the sizes of groups."""
        matches = find_all(queue, self._search(filters))
        sizes = Counter(self._group(match, filters) for match in matches)
        if filters.group:
            rank = {group: at for at, (group, _runs) in enumerate(sizes.most_common())}
            matches.sort(key=lambda match: rank[self._group(match, filters)])  # those of a group stay in true order
        return matches, sizes

    def _headings(
        self,
        rows: Sequence[QueuePageRow],
        shown: Mapping[int, Match],
        sizes: Mapping[tuple[str, str], int],
        filters: Filters,
    ) -> dict[int, str]:
        """The headings of groups, by the run that each stands above."""
        headings, before = {}, None
        for row in rows:
            group = self._group(shown[row.pk], filters)
            if group != before:
                headings[row.pk] = self._heading(group, sizes[group], filters)
            before = group
        return headings

    def _group(self, match: Match, filters: Filters) -> tuple[str, str]:
        if filters.group == "member":
            return self.members.get(match.user_id, ""), ""
        return self._reason(match.shape)

    def _heading(self, group: tuple[str, str], runs: int, filters: Filters) -> str:
        if filters.group == "member":
            text = ngettext("%(member)s: %(n)d run", "%(member)s: %(n)d runs", runs)
            return text % {"member": group[0], "n": runs}
        reason, wanted = group
        return waiting.shared(reason, worded_needs(wanted), runs)

    def _reason(self, shape: str) -> tuple[str, str]:
        """Why runs of a shape wait, and what they need if that is why. A shape that came a moment ago starts next."""
        reason, _data = self.reasons.get(shape, (WaitReason.STARTING, {}))
        return reason, self.needs.get(shape, "") if reason in waiting.ABOUT_NEEDS else ""

    def _search(self, filters: Filters) -> QueueSearch:
        """The filters as a search of runs."""
        shapes = None
        if filters.needs or filters.reason:
            shapes = frozenset(
                count.shape
                for count in self.counts
                if (not filters.reason or self.reasons[count.shape][0] == filters.reason)
                and (not filters.needs or self.needs.get(count.shape) == filters.needs)
            )
        return QueueSearch(filters.text, filters.user, filters.priority, shapes)

    def chips(self, filters: Filters) -> list[Chip]:
        """The reasons that at least MANY runs share, the most frequent first."""
        sums: Counter[tuple[str, str]] = Counter()
        for count in self.counts:
            sums[self._reason(count.shape)] += count.runs
        for reason in (WaitReason.STARTING, WaitReason.QUEUE_PAUSED):
            del sums[reason, ""]
        shared = sorted(((runs, *key) for key, runs in sums.items() if runs >= MANY), reverse=True)[:CHIPS]
        return [
            Chip(
                waiting.shared(reason, worded_needs(wanted), runs),
                filters.cleared._replace(needs=wanted, reason=reason).address(),
                (filters.reason, filters.needs) == (reason, wanted),
            )
            for runs, reason, wanted in shared
        ]

    def fields(self, filters: Filters) -> list[Field]:
        """The lists of the form; what is chosen is among what each offers."""
        needs = _with(filters.needs, dict.fromkeys(self.needs.values()))
        members = _with(filters.user, sorted(self.members.values()))
        reasons = _with(filters.reason, dict.fromkeys(self.reasons[count.shape][0] for count in self.counts))
        any_needs = [("", _("Any needs")), *((code, worded_needs(code)) for code in needs)]
        any_reason = [("", _("Any reason")), *((code, waiting.name(code)) for code in reasons)]
        groups = [("", _("No groups")), ("reason", _("By reason")), ("member", _("By member"))]
        return [
            Field("member", _("Member"), [("", _("All members")), *((one, one) for one in members)], filters.user),
            Field("needs", _("Needs"), any_needs, filters.needs),
            Field("reason", _("Reason"), any_reason, filters.reason),
            Field("group", _("Group"), groups, filters.group),
        ]


def _with(chosen: str, offered: Any) -> list[str]:
    found = [str(one) for one in offered]
    return found if not chosen or chosen in found else [*found, chosen]
