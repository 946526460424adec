"""Rows of the GPUs page: each GPU with its newest sample and who holds it, filtered and sorted."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlencode

from django.http import QueryDict
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Gpu, Host
from dstackweb.gpus.clock import to_moment, to_ms
from dstackweb.gpus.models import GpuSeries
from dstackweb.gpus.samples import latest
from dstackweb.runs import placement_summary
from dstackweb.runs.models import Run
from dstackweb.scheduler.hosts.selectors import HostSummary, list_hosts
from dstackweb.wording import policy as policy_words
from dstackweb.wording import units

STATES = {
    "held": gettext_lazy("allocated"),
    "free": gettext_lazy("free"),
    "outside": gettext_lazy("used outside dstackweb"),
    "away": gettext_lazy("unavailable"),
    "gone": gettext_lazy("missing"),
}
"""`away`: their host is offline or draining. `gone`: their host no longer reports them."""
MEASURES = {
    "utilization": gettext_lazy("Utilization"),
    "memory": gettext_lazy("Memory"),
    "power": gettext_lazy("Power"),
    "temperature": gettext_lazy("Temperature"),
}
"""Values that can colour the map and sort the list."""
COLDEST_C, HOTTEST_C = 30, 90
"""The ends of the temperature scale."""
SHADES = 10


@dataclass(frozen=True)
class GpuRow:
    """One GPU, with its newest sample, if any.

    `gpu` and `host` are None on cloud instances. `hidden`: its run belongs to a project that the user cannot see.
    """

    uuid: str
    index: int
    name: str
    memory_mib: int | None
    place: str
    state: str
    series: GpuSeries | None
    fresh: bool
    run: Run | None = None
    hidden: bool = False
    gpu: Gpu | None = None
    host: Host | None = None

    @property
    def label(self) -> str:
        """Its index on its machine; MIG devices share their GPU's index and add their profile."""
        text = _("GPU %d") % self.index
        return f"{text} · {self.name.rpartition('MIG ')[2]}" if "MIG " in self.name else text

    @property
    def at(self) -> dt.datetime | None:
        """The time of its newest sample."""
        return to_moment(self.series.last_ms) if self.series and self.series.last_ms is not None else None

    @cached_property
    def current(self) -> GpuSeries | None:
        """Its newest sample, unless that is stale."""
        return self.series if self.fresh and self.state != "gone" else None

    @cached_property
    def share(self) -> dict[str, float | None]:
        """By measure, percent of its maximum; None if unknown."""
        sample = self.current
        if sample is None:
            return dict.fromkeys(MEASURES)
        celsius = sample.temperature_c
        return {
            "utilization": sample.utilization,
            "memory": _part(sample.memory_used_mib, sample.memory_mib or self.memory_mib),
            "power": _part(sample.power_w, sample.power_limit_w),
            "temperature": None if celsius is None else _part(max(0, celsius - COLDEST_C), HOTTEST_C - COLDEST_C),
        }

    def text(self, measure: str) -> str:
        """The value of a measure, with its unit."""
        sample = self.current
        value: int | None = None
        if sample is not None:
            value = {
                "utilization": sample.utilization, "memory": sample.memory_used_mib, "power": sample.power_w,
                "temperature": sample.temperature_c,
            }[measure]  # fmt: skip
        if value is None:
            return "–"
        with_unit = {"utilization": f"{value} %", "power": f"{value} W", "temperature": f"{value} °C"}
        return with_unit.get(measure) or units.mebibytes(value)

    @cached_property
    def texts(self) -> dict[str, str]:
        """All measures, with their units."""
        return {measure: self.text(measure) for measure in MEASURES}

    @cached_property
    def throttle_reasons(self) -> list[str]:
        """Why its clocks are throttled now, in words."""
        return policy_words.held_back(latest.throttle_reasons(self.current.throttle)) if self.current else []

    @property
    def who(self) -> str:
        """Who holds it, in a few words."""
        if self.hidden:
            return _("a run of another project")
        if self.state == "away":
            return _("host offline") if self.offline else _("host draining")
        return self.run.name if self.run else str(STATES[self.state])

    @property
    def offline(self) -> bool:
        """Whether its host is offline."""
        return self.host is not None and not is_online(self.host)

    @property
    def stranger(self) -> str:
        """The first process that uses it outside dstackweb, if any."""
        found = self.gpu.stranger if self.gpu else None
        return (
            _("%(user)s, pid %(pid)s") % {"user": found.get("user", "?"), "pid": found.get("pid", "?")} if found else ""
        )

    @property
    def words(self) -> str:
        """The text that search looks in."""
        user = self.run.user.username if self.run and not self.hidden else ""
        return " ".join((self.place, self.name, self.uuid, self.who, user, self.stranger)).lower()

    @property
    def stamp(self) -> tuple[Any, ...]:
        """Everything of it that can change."""
        holder = self.run.pk if self.run else None
        return self.uuid, self.place, self.index, self.state, self.who, holder, self.fresh, self.stranger, (
            self.series.pk, self.series.last_ms) if self.series else None  # fmt: skip


def _part(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else min(100.0, 100 * value / of)


@dataclass(frozen=True)
class HeatCell:
    """One GPU on the map: the text and the shade (0 to 10, None if unknown) of the selected measure."""

    gpu: GpuRow
    text: str
    shade: int | None


@dataclass(frozen=True)
class GpuGroup:
    """The GPUs of one machine, or (without a name) all in the selected order."""

    name: str
    host: Host | None
    gpus: list[HeatCell]


@dataclass(frozen=True)
class GpuFilters:
    """The filters of the page: search words, state, sort order, measure of the colours, and map or table."""

    words: str = ""
    state: str = ""
    sort: str = "place"
    colour: str = "utilization"
    as_table: bool = False

    @classmethod
    def of(cls, query: QueryDict) -> GpuFilters:
        """From the query string; unknown values are ignored."""
        state, sort, colour = (query.get(name, "") for name in ("state", "sort", "colour"))
        return cls(
            query.get("q", "").strip()[:100],
            state if state in STATES else "",
            sort if sort.removeprefix("-") in ("place", "who", *MEASURES) else "place",
            colour if colour in MEASURES else "utilization",
            query.get("as") == "table",
        )

    def query(self, **changed: Any) -> str:
        """The query string with these values changed."""
        values = {
            "q": self.words, "state": self.state, "sort": self.sort, "colour": self.colour,
            "as": "table" if self.as_table else "",
        } | changed  # fmt: skip
        defaults = {"sort": "place", "colour": "utilization"}
        return "?" + urlencode({name: value for name, value in values.items() if value and value != defaults.get(name)})

    def select(self, rows: Iterable[GpuRow]) -> list[GpuRow]:
        """The matching GPUs in the selected order; unknown values come last."""
        words = self.words.lower().split()
        found = [
            row
            for row in rows
            if (not self.state or row.state == self.state) and all(word in row.words for word in words)
        ]
        by, reverse = self.sort.removeprefix("-"), self.sort.startswith("-")
        if by == "place":
            return found[::-1] if reverse else found
        if by == "who":
            return sorted(found, key=lambda row: (row.run is None, row.who.lower()), reverse=reverse)
        known = [(value, row) for row in found if (value := row.share[by]) is not None]
        unknown = [row for row in found if row.share[by] is None]
        return [row for _value, row in sorted(known, key=lambda one: one[0], reverse=not reverse)] + unknown

    def groups(self, selected: Sequence[GpuRow]) -> list[GpuGroup]:
        """By machine, or all together where they are sorted by something else."""
        found: dict[str, GpuGroup] = {}
        for row in selected:
            by_place = self.sort.removeprefix("-") == "place"
            name = row.place if by_place else ""
            group = found.setdefault(name, GpuGroup(name, row.host if by_place else None, []))
            group.gpus.append(self.cell(row))
        return list(found.values())

    def cell(self, row: GpuRow) -> HeatCell:
        """A GPU as a cell of the map."""
        share = row.share[self.colour]
        return HeatCell(row, row.text(self.colour), None if share is None else round(share / 100 * SHADES))


@dataclass(frozen=True)
class GpuList:
    """All GPUs that the user can see, with their totals."""

    rows: list[GpuRow] = field(default_factory=list)

    def count(self, state: str) -> int:
        """The number in this state."""
        return sum(row.state == state for row in self.rows)

    def mean(self, measure: str, state: str = "") -> float | None:
        """The average of a measure in percent, where known."""
        shares = [row.share[measure] for row in self.rows if not state or row.state == state]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known else None

    @property
    def present(self) -> int:
        """The number without missing ones."""
        return len(self.rows) - self.count("gone")


def all_gpus(project: Project, user: User, now: dt.datetime) -> GpuList:
    """The GPUs of every host, and those of cloud instances that the project's jobs hold.

    The number of queries doesn't depend on the number of GPUs.
    """
    seen = {one.pk for one in visible_projects(user)}
    return GpuList(of_hosts(list_hosts(), seen, now) + elsewhere(project, now))


def of_hosts(hosts: Sequence[HostSummary], seen: set[int], now: dt.datetime) -> list[GpuRow]:
    """The GPUs of these hosts; `seen` are the projects that the user can see."""
    now_ms, series = to_ms(now), latest.newest([gpu for one in hosts for gpu, _run in one.gpus])
    return [_of_gpu(one.host, gpu, run, series.get(gpu.uuid), seen, now_ms) for one in hosts for gpu, run in one.gpus]


def elsewhere(project: Project, now: dt.datetime) -> list[GpuRow]:
    """The GPUs of cloud instances that the project's jobs hold now."""
    return [_of_series(one, to_ms(now)) for one in latest.elsewhere(project.pk)]


def _of_gpu(host: Host, gpu: Gpu, run: Run | None, series: GpuSeries | None, seen: set[int], now_ms: int) -> GpuRow:
    if not gpu.present:
        state = "gone"
    elif run is not None:
        state = "held"
    elif gpu.stranger:
        state = "outside"
    else:
        state = "free" if is_online(host) and not host.draining else "away"
    fresh = series is not None and latest.is_fresh(series, now_ms)
    hidden = run is not None and run.project_id not in seen
    return GpuRow(
        gpu.uuid, gpu.index, gpu.name, gpu.memory_mib, host.name, state, series, fresh, run, hidden, gpu, host
    )


def _of_series(series: GpuSeries, now_ms: int) -> GpuRow:
    job = series.job
    assert job is not None
    place, fresh = placement_summary.where(job), latest.is_fresh(series, now_ms)
    return GpuRow(series.uuid, series.index, series.name, series.memory_mib, place, "held", series, fresh, job.run)
