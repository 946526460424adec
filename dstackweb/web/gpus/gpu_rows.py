"""Every GPU as the GPUs page shows it: what it does, who holds it, and which of them the reader wants to see."""

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
from dstackweb.backends.hosts.views import is_online
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
    "held": gettext_lazy("held by a run"),
    "free": gettext_lazy("free"),
    "outside": gettext_lazy("used outside dstackweb"),
    "away": gettext_lazy("not available"),
    "gone": gettext_lazy("gone"),
}
"""Those `away` are of hosts that are silent or take no new runs."""
MEASURES = {
    "utilization": gettext_lazy("Utilization"),
    "memory": gettext_lazy("Memory"),
    "power": gettext_lazy("Power"),
    "temperature": gettext_lazy("Temperature"),
}
"""What the colours can say, and lists can be sorted by."""
COLDEST_C, HOTTEST_C = 30, 90
"""The ends of the scale of temperatures."""
SHADES = 10


@dataclass(frozen=True)
class GpuLine:
    """One GPU, with its newest sample, if it was seen at all.

    `gpu` and `host` are None on machines that are no hosts. A run of a project that the reader doesn't see is `hidden`.
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
        """Which of its machine's it is; devices of one that is split by MIG have its number, and their own kind."""
        text = _("GPU %d") % self.index
        return f"{text} · {self.name.rpartition('MIG ')[2]}" if "MIG " in self.name else text

    @property
    def at(self) -> dt.datetime | None:
        """The moment of its newest sample."""
        return to_moment(self.series.last_ms) if self.series and self.series.last_ms is not None else None

    @cached_property
    def seen(self) -> GpuSeries | None:
        """Its newest sample, if that still tells of now."""
        return self.series if self.fresh and self.state != "gone" else None

    @cached_property
    def share(self) -> dict[str, float | None]:
        """By measure, from 0 to 100, how much of what there is; None is not known."""
        seen = self.seen
        if seen is None:
            return dict.fromkeys(MEASURES)
        heat = seen.temperature_c
        return {
            "utilization": seen.utilization,
            "memory": _part(seen.memory_used_mib, seen.memory_mib or self.memory_mib),
            "power": _part(seen.power_w, seen.power_limit_w),
            "temperature": None if heat is None else _part(max(0, heat - COLDEST_C), HOTTEST_C - COLDEST_C),
        }

    def text(self, measure: str) -> str:
        """What a measure is, with its unit."""
        seen = self.seen
        value: int | None = None
        if seen is not None:
            value = {
                "utilization": seen.utilization, "memory": seen.memory_used_mib, "power": seen.power_w,
                "temperature": seen.temperature_c,
            }[measure]  # fmt: skip
        if value is None:
            return "–"
        with_unit = {"utilization": f"{value} %", "power": f"{value} W", "temperature": f"{value} °C"}
        return with_unit.get(measure) or units.mebibytes(value)

    @cached_property
    def texts(self) -> dict[str, str]:
        """All measures with their units."""
        return {measure: self.text(measure) for measure in MEASURES}

    @cached_property
    def held_back(self) -> list[str]:
        """What holds its clocks down now, in words."""
        return policy_words.held_back(latest.held_back(self.seen.throttle)) if self.seen else []

    @property
    def who(self) -> str:
        """Who has it, in a few words."""
        if self.hidden:
            return _("a run of another project")
        if self.state == "away":
            return _("host offline") if self.offline else _("host draining")
        return self.run.name if self.run else str(STATES[self.state])

    @property
    def offline(self) -> bool:
        """Whether it is of a host that is silent."""
        return self.host is not None and not is_online(self.host)

    @property
    def stranger(self) -> str:
        """The process of no run's that uses it, if one does."""
        found = self.gpu.stranger if self.gpu else None
        return (
            _("%(user)s, pid %(pid)s") % {"user": found.get("user", "?"), "pid": found.get("pid", "?")} if found else ""
        )

    @property
    def words(self) -> str:
        """What a search finds it by."""
        user = self.run.user.username if self.run and not self.hidden else ""
        return " ".join((self.place, self.name, self.uuid, self.who, user, self.stranger)).lower()

    @property
    def stamp(self) -> tuple[Any, ...]:
        """All of it that changes."""
        holder = self.run.pk if self.run else None
        return self.uuid, self.place, self.index, self.state, self.who, holder, self.fresh, self.stranger, (
            self.series.pk, self.series.last_ms) if self.series else None  # fmt: skip


def _part(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else min(100.0, 100 * value / of)


@dataclass(frozen=True)
class Shown:
    """One GPU with the measure that the colours say: its text and its shade, 0 to 10, or None for not known."""

    of: GpuLine
    text: str
    shade: int | None


@dataclass(frozen=True)
class Group:
    """The GPUs of one machine, or (without a name) all in the order asked for."""

    name: str
    host: Host | None
    gpus: list[Shown]


@dataclass(frozen=True)
class Asked:
    """Which GPUs the reader wants to see, how sorted, coloured by what, and whether as a table."""

    words: str = ""
    state: str = ""
    sort: str = "place"
    colour: str = "utilization"
    as_table: bool = False

    @classmethod
    def of(cls, query: QueryDict) -> Asked:
        """From the address; what is not known there is as usual."""
        state, sort, colour = (query.get(name, "") for name in ("state", "sort", "colour"))
        return cls(
            query.get("q", "").strip()[:100],
            state if state in STATES else "",
            sort if sort.removeprefix("-") in ("place", "who", *MEASURES) else "place",
            colour if colour in MEASURES else "utilization",
            query.get("as") == "table",
        )

    def query(self, **changed: Any) -> str:
        """The same with something else, as a query string."""
        values = {
            "q": self.words, "state": self.state, "sort": self.sort, "colour": self.colour,
            "as": "table" if self.as_table else "",
        } | changed  # fmt: skip
        usual = {"sort": "place", "colour": "utilization"}
        return "?" + urlencode({name: value for name, value in values.items() if value and value != usual.get(name)})

    def chosen(self, lines: Iterable[GpuLine]) -> list[GpuLine]:
        """Those asked for, in the order asked for; what is not known comes last."""
        words = self.words.lower().split()
        found = [
            line
            for line in lines
            if (not self.state or line.state == self.state) and all(word in line.words for word in words)
        ]
        by, turned = self.sort.removeprefix("-"), self.sort.startswith("-")
        if by == "place":
            return found[::-1] if turned else found
        if by == "who":
            return sorted(found, key=lambda line: (line.run is None, line.who.lower()), reverse=turned)
        known = [(value, line) for line in found if (value := line.share[by]) is not None]
        unknown = [line for line in found if line.share[by] is None]
        return [line for _value, line in sorted(known, key=lambda one: one[0], reverse=not turned)] + unknown

    def groups(self, chosen: Sequence[GpuLine]) -> list[Group]:
        """By machine, or all together where they are sorted by something else."""
        found: dict[str, Group] = {}
        for line in chosen:
            by_place = self.sort.removeprefix("-") == "place"
            name = line.place if by_place else ""
            group = found.setdefault(name, Group(name, line.host if by_place else None, []))
            group.gpus.append(self.shown(line))
        return list(found.values())

    def shown(self, line: GpuLine) -> Shown:
        """A GPU by the measure that the colours say."""
        share = line.share[self.colour]
        return Shown(line, line.text(self.colour), None if share is None else round(share / 100 * SHADES))


@dataclass(frozen=True)
class Everything:
    """All GPUs that the reader may see, and what they come to."""

    lines: list[GpuLine] = field(default_factory=list)

    def count(self, state: str) -> int:
        """How many there are in this state."""
        return sum(line.state == state for line in self.lines)

    def mean(self, measure: str, state: str = "") -> float | None:
        """The average of a measure over those that are known, percent."""
        shares = [line.share[measure] for line in self.lines if not state or line.state == state]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known else None

    @property
    def there(self) -> int:
        """How many there are now."""
        return len(self.lines) - self.count("gone")


def everything(project: Project, user: User, now: dt.datetime) -> Everything:
    """The GPUs of every host, and of other machines those that the project's jobs have.

    Few queries however many there are.
    """
    seen = {one.pk for one in visible_projects(user)}
    return Everything(of_hosts(list_hosts(), seen, now) + elsewhere(project, now))


def of_hosts(hosts: Sequence[HostSummary], seen: set[int], now: dt.datetime) -> list[GpuLine]:
    """The GPUs of these hosts; `seen` are the projects that the reader sees."""
    now_ms, series = to_ms(now), latest.newest([gpu for one in hosts for gpu, _run in one.gpus])
    return [_of_gpu(one.host, gpu, run, series.get(gpu.uuid), seen, now_ms) for one in hosts for gpu, run in one.gpus]


def elsewhere(project: Project, now: dt.datetime) -> list[GpuLine]:
    """The GPUs of machines that are no hosts, which the project's jobs have now."""
    return [_of_series(one, to_ms(now)) for one in latest.elsewhere(project.pk)]


def _of_gpu(host: Host, gpu: Gpu, run: Run | None, series: GpuSeries | None, seen: set[int], now_ms: int) -> GpuLine:
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
    return GpuLine(
        gpu.uuid, gpu.index, gpu.name, gpu.memory_mib, host.name, state, series, fresh, run, hidden, gpu, host
    )


def _of_series(series: GpuSeries, now_ms: int) -> GpuLine:
    job = series.job
    assert job is not None
    place, fresh = placement_summary.where(job), latest.is_fresh(series, now_ms)
    return GpuLine(series.uuid, series.index, series.name, series.memory_mib, place, "held", series, fresh, job.run)
