"""Rows of the GPUs page: each GPU with its newest sample and who holds it, filtered and sorted."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.http import QueryDict
from django.utils.translation import gettext as _, gettext_lazy, pgettext_lazy

from dstackweb.accounts.models import Project
from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Gpu, Host
from dstackweb.gpus import selectors as samples
from dstackweb.gpus.models import GpuSeries
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.runs import run_places
from dstackweb.runs.models import Run
from dstackweb.scheduler.team_hosts import HostSummary
from dstackweb.wording import policy as policy_words, units

STATES = {
    "held": gettext_lazy("allocated"),
    "free": gettext_lazy("free"),
    "outside": gettext_lazy("used outside dstackweb"),
    "away": gettext_lazy("unavailable"),
    "gone": gettext_lazy("missing"),
}
"""`away`: their host is offline, draining or held back. `gone`: their host no longer reports them."""
MEASURES = {
    "utilization": gettext_lazy("Utilization"),
    "memory": pgettext_lazy("GPU", "Memory"),
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

    @cached_property
    def texts(self) -> dict[str, str]:
        """All measures, with their units."""
        sample = self.current
        if sample is None:
            return dict.fromkeys(MEASURES, "–")
        return {
            "utilization": _with_unit(sample.utilization, "%"),
            "memory": "–" if sample.memory_used_mib is None else units.mebibytes(sample.memory_used_mib),
            "power": _with_unit(sample.power_w, "W"),
            "temperature": _with_unit(sample.temperature_c, "°C"),
        }

    @cached_property
    def throttle_reasons(self) -> list[str]:
        """Why its clocks are throttled now, in words."""
        reasons = samples.throttle_reasons(self.current.throttle) if self.current else ()
        return [policy_words.throttled(reason) for reason in reasons]

    @property
    def who(self) -> str:
        if self.hidden:
            return _("a run of another project")
        if self.state == "away":
            if self.offline:
                return _("host offline")
            return _("host draining") if self.host is None or self.host.draining else _("host held back")
        return self.run.name if self.run else str(STATES[self.state])

    @property
    def offline(self) -> bool:
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
        holder = self.run.pk if self.run else None
        return self.uuid, self.place, self.index, self.state, self.who, holder, self.fresh, self.stranger, (
            self.series.pk, self.series.last_ms) if self.series else None  # fmt: skip


def _with_unit(value: int | None, unit: str) -> str:
    return "–" if value is None else f"{value} {unit}"


def _part(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else min(100.0, 100 * value / of)


class HeatCell(NamedTuple):
    """One GPU on the map: the text and the shade (0 to 10, None if unknown) of the selected measure."""

    gpu: GpuRow
    text: str
    shade: int | None


class GpuGroup(NamedTuple):
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


def groups(selected: Sequence[GpuRow], filters: GpuFilters) -> list[GpuGroup]:
    """By machine, or all together where they are sorted by something else."""
    found: dict[str, GpuGroup] = {}
    by_place = filters.sort.removeprefix("-") == "place"
    for row in selected:
        name = row.place if by_place else ""
        share = row.share[filters.colour]
        shade = None if share is None else round(share / 100 * SHADES)
        group = found.setdefault(name, GpuGroup(name, row.host if by_place else None, []))
        group.gpus.append(HeatCell(row, row.texts[filters.colour], shade))
    return list(found.values())


def mean(measure: str, rows: Iterable[GpuRow]) -> float | None:
    """The average of a measure in percent, where known."""
    known = [share for row in rows if (share := row.share[measure]) is not None]
    return sum(known) / len(known) if known else None


def of_hosts(hosts: Sequence[HostSummary], seen: set[int], now: dt.datetime) -> list[GpuRow]:
    """The GPUs of these hosts, with as many queries for any number; `seen` are the projects that the user can see."""
    now_ms, series = to_ms(now), samples.newest([gpu for one in hosts for gpu, _run in one.gpus])
    return [_of_gpu(one.host, gpu, run, series.get(gpu.uuid), seen, now_ms) for one in hosts for gpu, run in one.gpus]


def elsewhere(project: Project, now: dt.datetime) -> list[GpuRow]:
    """The GPUs of cloud instances that the project's jobs hold now."""
    return [_of_series(one, to_ms(now)) for one in samples.elsewhere(project.pk)]


def _of_gpu(host: Host, gpu: Gpu, run: Run | None, series: GpuSeries | None, seen: set[int], now_ms: int) -> GpuRow:
    if not gpu.present:
        state = "gone"
    elif run is not None:
        state = "held"
    elif gpu.stranger:
        state = "outside"
    else:
        takes_jobs = is_online(host) and not host.draining and host.held_back_at is None
        state = "free" if takes_jobs else "away"
    fresh = series is not None and samples.is_fresh(series, now_ms)
    hidden = run is not None and run.project_id not in seen
    return GpuRow(
        gpu.uuid, gpu.index, gpu.name, gpu.memory_mib, host.name, state, series, fresh, run, hidden, gpu, host
    )


def _of_series(series: GpuSeries, now_ms: int) -> GpuRow:
    job = series.job
    assert job is not None
    place, fresh = run_places.job_place(job), samples.is_fresh(series, now_ms)
    return GpuRow(series.uuid, series.index, series.name, series.memory_mib, place, "held", series, fresh, job.run)
