"""Jobs replayed in simulated time: a pass after each submission and end, with the decisions of the placement pass.

Ranks, penalties, places, reservations and victims come from the scheduler's own pure functions. What is here keeps the
rows that it would: who waits, what is held, what was reserved. As in a real pass, runs of one shape are decided once.
"""

from __future__ import annotations

import datetime as dt
import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bench.replay.jobs import DAY, GPUS_OF_HOST, Job
from dstackweb.backends.hosts.fit import GpuView, HostView
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.ordering import Load
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.displacing import Displacer
from dstackweb.scheduler.placement.hosts import HostPlacement, PlacedRun, Wait, WaitingRun
from dstackweb.scheduler.placement.offers import OfferPlacement
from dstackweb.scheduler.placement.reservation import HostReservation, JobUsage, Turns, is_ahead, latest_end
from dstackweb.spec.effective import EffectiveSpec, Requirements

T0 = dt.datetime(2026, 1, 5, tzinfo=dt.UTC)
QUEUE, PROJECT = 1, 1
RESERVE_AFTER_S, RESERVE_FOR_S = 900.0, 3600.0
"""The defaults."""
WARM_UP = 10
"""The first tenth of the jobs fills the cluster, and is in no figure."""
COUNT_SHARES_S = 60.0
HALF_LIFE_DAYS = 7
STOP_S = 20
"""`stop_duration`: displaced jobs take all of it."""
CPUS, MEMORY_MIB = 128, 1 << 20
"""Of a host: more than its jobs ever need, so that GPUs alone decide."""
FULL = Wait(WaitReason.WAITING_FOR_CAPACITY)


@dataclass(frozen=True)
class Policy:
    """What decides the order, and what a run may do beyond waiting for its turn."""

    name: str
    priorities: bool = True
    reserves: bool = True
    """A run that has waited for 15 minutes gets hosts reserved; those behind it run only if they end before."""
    fair_share_minutes: int | None = None
    preempt_points: int | None = None
    in_order: bool = False
    """Nothing starts before a run that is ahead of it."""
    shortest_first: bool = False


POLICIES = (
    Policy("FIFO, no one passes", priorities=False, reserves=False, in_order=True),
    Policy("FIFO, what fits starts", priorities=False, reserves=False),
    Policy("priority", reserves=False),
    Policy("+ backfill"),
    Policy("+ fair share", fair_share_minutes=240),
    Policy("+ preemption", fair_share_minutes=240, preempt_points=20),
    Policy("shortest first, known ahead", priorities=False, reserves=False, shortest_first=True),
)
DEFAULT = POLICIES[3]
"""What a new queue does."""


@dataclass(slots=True)
class Record:
    """What became of a job. Times are seconds; `queued_s` is all that it has waited."""

    job: Job
    started: float = -1.0
    ended: float = -1.0
    queued_s: float = 0.0
    lost_s: float = 0.0
    displaced: int = 0


@dataclass(slots=True)
class Active:
    """A job that runs. `since` and `ends` are seconds."""

    job: Job
    run: WaitingRun
    usage: tuple[JobUsage, ...]
    since: float
    ends: float
    is_stopping: bool = False
    counted_to: float = 0.0


@dataclass(order=True, slots=True)
class Waiting:
    """A waiting run, in the order of its queue."""

    place: tuple[int, int]
    run: WaitingRun = field(compare=False)
    job: Job = field(compare=False)
    since: float = field(compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        return id(self.run.spec), self.job.member


def cluster(hosts: int) -> list[HostView]:
    """Hosts with eight GPUs each."""
    return [
        HostView(
            number, f"box-{number}", online=True, draining=False, isolation="user", cpus=CPUS, cpus_free=CPUS,
            memory_mib=MEMORY_MIB, memory_free_mib=MEMORY_MIB,
            gpus=tuple(GpuView(f"{number}-{i}", i, "NVIDIA A100-SXM4-80GB", 81920) for i in range(GPUS_OF_HOST)),
        )
        for number in range(1, hosts + 1)
    ]  # fmt: skip


def after(second: float) -> dt.datetime:
    """The moment so many seconds after the beginning."""
    return T0 + dt.timedelta(seconds=second)


def to_us(second: float) -> int:
    """The same in microseconds since 1970."""
    return round((T0.timestamp() + second) * 1e6)


class Shares:
    """The members' loads: GPU time used by day, GPUs held and queued, counted once a minute at most."""

    def __init__(self, minutes: int) -> None:
        self._bound_s = minutes * 60
        self._used_ms: defaultdict[int, defaultdict[dt.date, int]] = defaultdict(lambda: defaultdict(int))
        self._loads: dict[int, Load] = {}
        self._counted_at = -COUNT_SHARES_S

    def enter(self, job: Job, second: float, deployment: Deployment) -> int:
        """The penalty of a run that enters the queue, in seconds."""
        if second - self._counted_at >= COUNT_SHARES_S:
            self._count(second, deployment)
        own = self._loads.get(job.member, Load())
        self._loads[job.member] = own = own._replace(queued_gpus=own.queued_gpus + job.all_gpus)
        return ordering.penalty(own, list(self._loads.values()), self._bound_s, job.all_gpus).seconds

    def use(self, active: Active, until: float) -> None:
        """Count what a job has used since it was counted last."""
        since, active.counted_to = active.counted_to, until
        while since < until:
            day = int(since // DAY)
            part = min(until, (day + 1) * DAY)
            gpu_ms = round((part - since) * active.job.all_gpus * 1000)
            self._used_ms[active.job.member][T0.date() + dt.timedelta(days=day)] += gpu_ms
            since = part

    def _count(self, second: float, deployment: Deployment) -> None:
        self._counted_at = second
        for active in deployment.active.values():
            self.use(active, second)
        held, queued = Counter[int](), Counter[int]()
        for active in deployment.active.values():
            held[active.job.member] += active.job.all_gpus
        for waiting in deployment.waiting:
            queued[waiting.job.member] += waiting.job.all_gpus
        first = (after(second) - dt.timedelta(days=HALF_LIFE_DAYS * ordering.HALF_LIVES)).date()
        self._loads = {
            member: Load(
                ordering.decayed_ms(
                    ((day, used) for day, used in self._used_ms[member].items() if day >= first),
                    after(second),
                    HALF_LIFE_DAYS,
                ),
                held[member],
                queued[member],
            )
            for member in self._used_ms.keys() | held.keys() | queued.keys()
        }


class Deployment:
    """Hosts and one queue, while jobs come and go."""

    def __init__(self, policy: Policy, hosts: int, watch: Callable[[Deployment, float], None] | None = None) -> None:
        """`watch` is called after each pass."""
        self.policy, self.watch = policy, watch
        self.hosts = {host.id: host for host in cluster(hosts)}
        self.waiting: list[Waiting] = []
        self.active: dict[int, Active] = {}
        self.records: dict[int, Record] = {}
        self.ended: list[Record] = []
        self.passes = 0
        self.exact = False
        """Ask for every decision and make every pass, also where it is known that nothing starts: the same, slowly."""
        self.shares = Shares(policy.fair_share_minutes) if policy.fair_share_minutes else None
        self._rows: dict[int, HostReservation] = {}
        self._ends: list[tuple[float, int]] = []
        self._specs: dict[tuple[int, int, int], EffectiveSpec] = {}
        self._last_seniority_us = 0
        self.window = 0.0, 0.0
        """From when the cluster is full to the last submission."""
        self.held_s = 0.0
        """GPU-seconds that jobs held in this window."""

    def replay(self, jobs: Sequence[Job]) -> list[Record]:
        """What becomes of these jobs, in their order."""
        self.window = jobs[len(jobs) // WARM_UP].at, jobs[-1].at
        coming = 0
        while coming < len(jobs) or self._ends:
            submitted = [jobs[coming].at] if coming < len(jobs) else []
            second = min([*submitted, *(end for end, _job_id in self._ends[:1])])
            while self._ends and self._ends[0][0] <= second:
                self._end(*heapq.heappop(self._ends))
            while coming < len(jobs) and jobs[coming].at <= second:
                self._submit(jobs[coming], second)
                coming += 1
            if self.waiting and (self.exact or self.policy.preempt_points is not None or self._may_start()):
                self._do_pass(second)
            if self.watch is not None:
                self.watch(self, second)
        return [self.records[job.id] for job in jobs]

    def _may_start(self) -> bool:
        """Whether the free GPUs are enough for anything that waits."""
        free = [sum([gpu.free for gpu in host.gpus]) for host in self.hosts.values()]
        needs = {(waiting.job.nodes, waiting.job.gpus) for waiting in self.waiting}
        return any(sum([number // gpus for number in free]) >= nodes for nodes, gpus in needs)

    def spec_of(self, job: Job) -> EffectiveSpec:
        """The same object for jobs that need the same."""
        key = job.nodes, job.gpus, job.limit_s
        if key not in self._specs:
            self._specs[key] = EffectiveSpec(
                commands=("train",), nodes=job.nodes, requirements=Requirements(gpu_count_min=job.gpus),
                max_duration_s=job.limit_s, stop_duration_s=STOP_S,
            )  # fmt: skip
        return self._specs[key]

    def _priority(self, job: Job) -> int:
        return job.priority if self.policy.priorities else ordering.PRIORITY_DEFAULT

    def _submit(self, job: Job, second: float) -> None:
        self._last_seniority_us = seniority = ordering.next_seniority(to_us(second), self._last_seniority_us)
        if self.policy.shortest_first:
            rank = round(job.took_s * 1e6)
        else:
            penalty_s = self.shares.enter(job, second, self) if self.shares else 0
            step = ordering.step_us(ordering.DEFAULT_AGEING_MINUTES)
            rank = ordering.rank(seniority, self._priority(job), step, penalty_s)
        run = WaitingRun(job.id, job.name, PROJECT, "main", QUEUE, job.member, rank, after(second), self.spec_of(job))
        self.records[job.id] = Record(job)
        insort(self.waiting, Waiting(run.place, run, job, second))

    def _end(self, second: float, job_id: int) -> None:
        active = self.active.get(job_id)
        if active is None or active.ends != second:
            return  # it was displaced, and has started again since
        del self.active[job_id]
        begin, end = self.window
        self.held_s += active.job.all_gpus * max(0.0, min(second, end) - max(active.since, begin))
        if self.shares:
            self.shares.use(active, second)
        for used in active.usage:
            self._give_back(used)
        record = self.records[job_id]
        if not active.is_stopping:
            record.ended = second
            self.ended.append(record)
            return
        record.lost_s += second - active.since
        run = replace(active.run, queued_at=after(second))
        insort(self.waiting, Waiting(run.place, run, active.job, second))

    def _give_back(self, used: JobUsage) -> None:
        host = self.hosts[used.host_id]
        self.hosts[used.host_id] = replace(
            host,
            cpus_free=host.cpus_free + used.cpus,
            memory_free_mib=host.memory_free_mib + used.memory_mib,
            gpus=tuple(replace(gpu, held=False) if gpu.uuid in used.gpus else gpu for gpu in host.gpus),
        )

    def _do_pass(self, second: float) -> None:
        """As `scheduler.passes.placement_pass`, without rows."""
        self.passes += 1
        policy, now = self.policy, after(second)
        holders = [used for active in self.active.values() for used in active.usage]
        capacity = (Capacity if self.exact else _Capacity)(
            now=now,
            reserve_after_s=RESERVE_AFTER_S if policy.reserves else float("inf"),
            reserve_for_s=RESERVE_FOR_S,
            hosts=tuple(self.hosts.values()),
            read_job_usage=lambda: holders,
            preempt_points={} if policy.preempt_points is None else {QUEUE: policy.preempt_points},
            placed_runs=lambda queue_id: self._preemptible(),
            turns=Turns.of(self._rows.values()),
        )
        displacer = Displacer(capacity)
        capacity.review_reservations()
        blocked: set[tuple[int, int]] = set()
        started = []
        for waiting in self.waiting:
            if waiting.shape in blocked:
                continue
            outcome = capacity.decide(waiting.run)
            if not isinstance(outcome, Wait):
                assert isinstance(outcome, HostPlacement)
                capacity.take(waiting.run, outcome)
                started.append((waiting, outcome))
                continue
            blocked.add(waiting.shape)
            if victims := displacer.displace_for(waiting.run, self._priority(waiting.job), outcome):
                self._stop(victims, second)
            elif self.exact or not any(is_ahead(one.run, waiting.run) for one in capacity.turns.kept.values()):
                capacity.reserve_for(waiting.run, outcome)  # none where all hosts are alike and one ahead has one
            if policy.in_order:
                break
        self._rows = capacity.turns.rows
        self.hosts = {host.id: host for host in capacity.hosts}
        for waiting, outcome in started:
            self._start(waiting, outcome, second)

    def _start(self, waiting: Waiting, placed: HostPlacement, second: float) -> None:
        del self.waiting[bisect_left(self.waiting, waiting)]
        job, record = waiting.job, self.records[waiting.job.id]
        record.queued_s += second - waiting.since
        if record.started < 0:
            record.started = second
        spec, since = waiting.run.spec, after(second)
        end = latest_end(since, spec.max_duration_s, spec.stop_duration_s, since)
        usage = tuple(
            JobUsage((job.id, node), fit.host_id, fit.cpus, fit.memory_mib, frozenset(fit.gpu_uuids), since, end)
            for node, fit in enumerate(placed.fits)
        )
        self.active[job.id] = Active(job, waiting.run, usage, second, second + job.took_s, counted_to=second)
        heapq.heappush(self._ends, (second + job.took_s, job.id))

    def _preemptible(self) -> list[PlacedRun]:
        return [
            PlacedRun(
                active.run.id, active.run.name, active.job.member, str(active.job.member), 1, active.run.rank,
                self._priority(active.job), after(active.since), STOP_S, active.run.queue_id,
            )
            for active in self.active.values()
            if active.job.preemptible and not active.is_stopping
        ]  # fmt: skip

    def _stop(self, victims: Sequence[PlacedRun], second: float) -> None:
        for victim in victims:
            active = self.active[victim.id]
            if active.ends <= second + STOP_S:
                continue  # it ends by itself before it is killed
            active.ends, active.is_stopping = second + STOP_S, True
            self.records[victim.id].displaced += 1
            end = latest_end(after(second), 0, STOP_S, after(second))
            active.usage = tuple(replace(used, ends_at=end, stopping=True) for used in active.usage)
            heapq.heappush(self._ends, (active.ends, victim.id))

    def held_gpus(self) -> Iterator[int]:
        """GPUs that are held, by host."""
        for host in self.hosts.values():
            yield sum(gpu.held for gpu in host.gpus)


class _Capacity(Capacity):
    """Decides as `Capacity` does, but for the numbers of reasons, and asks it only on runs that start.

    Hosts have enough of all but GPUs, and the queue has no limits: so a run starts exactly where so many GPUs are free
    on the hosts without what is reserved for runs ahead of it.
    """

    def decide(self, run: WaitingRun) -> HostPlacement | OfferPlacement | Wait:
        gpus, hosts = run.spec.requirements.gpu_count_min, self.unreserved_hosts(run)
        if sum([free // gpus for free in self._free(hosts)]) < run.spec.nodes:
            return FULL
        outcome = super().decide(run)
        assert isinstance(outcome, HostPlacement)
        return outcome

    def _free(self, hosts: Sequence[HostView]) -> list[int]:
        if getattr(self, "_counted", None) is not hosts:
            self._counted = hosts
            self._counts = [sum([not gpu.held for gpu in host.gpus]) for host in hosts]
        return self._counts
