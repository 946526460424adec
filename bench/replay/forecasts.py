"""Estimates of starts on a replay: made and corrected as the worker does it, with counters in memory for its rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.replay.deployment import PROJECT, QUEUE, STOP_S, Deployment, Policy, after
from bench.replay.jobs import Job
from dstackweb.accounts.models import Project
from dstackweb.runs import start_estimates
from dstackweb.runs.learned_durations import BINS, Learned
from dstackweb.runs.models import Queue, StartEstimate
from dstackweb.runs.prefix_counters import prefix_and_group
from dstackweb.runs.start_estimates import SCORES_MAX, Record, ShownEstimate
from dstackweb.scheduler.passes import forecast_pass
from dstackweb.scheduler.passes.forecast_pass import Forecast
from dstackweb.scheduler.passes.loading import Placed, Waiting
from dstackweb.scheduler.placement.forecast import NEVER
from dstackweb.scheduler.placement.reservation import MARGIN_S


class Scores:
    """The track record, as `start_estimates` keeps it in rows."""

    def __init__(self) -> None:
        self.bins: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self.in_time: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)

    @property
    def records(self) -> dict[tuple[int, int], Record]:
        return {key: Record(bins, self.in_time[key].total()) for key, bins in self.bins.items()}

    def score(self, starts: Iterable[tuple[ShownEstimate, float]]) -> None:
        """Count starts; from SCORES_MAX on, those of a group are halved."""
        changes, met = start_estimates.tally(starts)
        for (*key, number), count in changes.items():
            self.bins[key[0], key[1]][number] += count
            self.in_time[key[0], key[1]][number] += met[key[0], key[1], number]
        for key in {place[:2] for place in changes}:
            if self.bins[key].total() >= SCORES_MAX:
                for counts in (self.bins, self.in_time):
                    counts[key] = Counter({number: count // 2 for number, count in counts[key].items() if count > 1})


@dataclass(frozen=True, slots=True)
class Outcome:
    """A start (Unix time) beside what was shown of it at some moment; `is_first`: when a time was shown first."""

    shown: ShownEstimate
    start: float
    is_first: bool


@dataclass(frozen=True)
class Calibration:
    """Of so many starts, the shares (0 to 1) before P50, between P50 and P90, and after P90."""

    starts: int
    before: float
    inside: float
    after: float

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], *, corrected: bool = True) -> Calibration:
        """`corrected`: by what was shown, otherwise by what the simulation said."""
        counts = Counter(_place(one.start, *_window(one.shown, corrected)) for one in outcomes)
        total = counts.total()
        return cls(total, *(counts[place] / total if total else 0.0 for place in range(3)))


def _window(shown: ShownEstimate, corrected: bool) -> tuple[float, float]:
    p90 = shown.p90 if corrected else shown.raw90_s
    if corrected:
        return shown.p50, NEVER if p90 is None else p90
    return shown.at + shown.raw50_s, NEVER if p90 is None else shown.at + p90


def _place(start: float, p50: float, p90: float) -> int:
    return 0 if start <= p50 else 1 if start <= p90 else 2


@dataclass
class Forecaster:
    """Watches a deployment: refreshes its estimates so often (simulated seconds), and remembers how they did."""

    every_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    refreshes: int = 0

    def __post_init__(self) -> None:
        self.scores = Scores()
        self._due = 0.0
        self._rows: dict[int, StartEstimate] = {}
        self._shown: defaultdict[int, list[ShownEstimate]] = defaultdict(list)
        self._learned: defaultdict[tuple[int, str], dict[int, Counter[int]]] = defaultdict(dict)
        self._seen = 0
        self._queue = Queue(pk=QUEUE, project=Project(pk=PROJECT, name="main"))

    def __call__(self, deployment: Deployment, second: float) -> None:
        """After a pass."""
        if second >= self._due and deployment.waiting:
            self._due = second + self.every_s
            self._learn(deployment)
            self._settle(deployment)
            self._refresh(deployment, second)

    def _learn(self, deployment: Deployment) -> None:
        for record in deployment.ended[self._seen :]:
            if not record.displaced:
                by_user = self._learned[PROJECT, prefix_and_group(record.job.name)[0]]
                took_s = record.ended - record.started
                by_user.setdefault(record.job.member, Counter())[BINS.bin_of(took_s)] += 1
        self._seen = len(deployment.ended)

    def _settle(self, deployment: Deployment) -> None:
        waiting = {one.job.id for one in deployment.waiting}
        found = []
        for run_id in sorted(self._rows.keys() - waiting):
            record, row, shown = deployment.records[run_id], self._rows.pop(run_id), self._shown.pop(run_id, [])
            start = after(record.started).timestamp()
            found += [(one, start) for one in forecast_pass.first_shown(row) if start >= one.at]
            if record.job.at >= deployment.window[0]:
                self.outcomes += [Outcome(one, start, one is shown[0]) for one in shown if start >= one.at]
        self.scores.score(found)

    def _refresh(self, deployment: Deployment, second: float) -> None:
        waiting = [
            Waiting(one.job.id, QUEUE, one.job.member, one.run.rank, one.run.rank, _shape(one.job), one.job.name)
            for one in deployment.waiting
        ]
        forecast = Forecast(
            queues={QUEUE: self._queue},
            hosts=list(deployment.hosts.values()),
            usage=[used for active in deployment.active.values() for used in active.usage],
            waiting={QUEUE: waiting},
            placed=[
                Placed(
                    job.id, QUEUE, job.member, PROJECT, job.name, job.all_gpus, second - active.since,
                    float(job.limit_s + STOP_S + MARGIN_S),
                )
                for active in deployment.active.values()
                for job in [active.job]
            ],
            specs={_shape(one.job): one.run.spec for one in deployment.waiting},
            verdicts={},
            learned={key: Learned(by_user) for key, by_user in self._learned.items()},
        )  # fmt: skip
        records, now = self.scores.records, after(second)
        self.refreshes += 1
        for made in forecast.estimate():
            row = forecast_pass.new_row(made, self._rows.get(made.run_id), records, now)
            if row is not None:
                self._rows[made.run_id] = row
            row = self._rows[made.run_id]
            if made.raw50_s is not None and row.p50 is not None:
                p90 = row.p90.timestamp() if row.p90 else None
                shown = ShownEstimate(now.timestamp(), made.raw50_s, made.raw90_s, row.p50.timestamp(), p90)
                self._shown[made.run_id].append(shown)


def _shape(job: Job) -> str:
    return f"{job.nodes}x{job.gpus}, {job.limit_s}"


def forecast(policy: Policy, jobs: Sequence[Job], hosts: int, every_s: float) -> Forecaster:
    """How estimates do while these jobs are replayed."""
    watch = Forecaster(every_s)
    Deployment(policy, hosts, watch).replay(jobs)
    return watch
