"""Runs, their attempts' jobs, what the jobs hold, and the queues they wait in.

A status is written by `transitions` alone; a rank is written behind the row of its queue.
"""

from __future__ import annotations

from dstackweb.runs.models.counts import (
    BudgetMark,
    LearnedDuration,
    QueueHour,
    QueueSlot,
    QueueSpan,
    RemovedRun,
    RemovedSpend,
    RemovedUsage,
    StartEstimate,
    StartScore,
    UsageDay,
)
from dstackweb.runs.models.jobs import (
    Allocation,
    Artifact,
    Job,
    ProjectArtifacts,
    ProjectLogs,
    RunActivity,
    RunArtifacts,
    ServiceHealth,
)
from dstackweb.runs.models.queues import (
    MAX_LIMIT,
    DisplacedWork,
    MemberShare,
    Move,
    PastPlace,
    PastVerdict,
    Queue,
    QueueCount,
    QueueEvent,
    Verdict,
)
from dstackweb.runs.models.runs import Archive, Dependency, Run, RunEvent, Sweep, SweepCount
