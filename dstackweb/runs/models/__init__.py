"""Runs, their attempts' jobs, what the jobs hold, and the queues they wait in.

A status is written by `transitions` alone; a rank is written behind the row of its queue.
"""

from __future__ import annotations

from dstackweb.runs.models.activity import RunActivity, ServiceHealth
from dstackweb.runs.models.base import MAX_LIMIT, StatusCount
from dstackweb.runs.models.files import Artifact, ProjectArtifacts, ProjectLogs, RunArtifacts
from dstackweb.runs.models.jobs import Allocation, Job, JobQuerySet
from dstackweb.runs.models.queues import (
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
from dstackweb.runs.models.usage import BudgetMark, RemovedRun, RemovedSpend, RemovedUsage, UsageDay
from dstackweb.runs.models.waits import LearnedDuration, QueueHour, QueueSlot, QueueSpan, StartEstimate, StartScore

__all__ = [
    "MAX_LIMIT",
    "Allocation",
    "Archive",
    "Artifact",
    "BudgetMark",
    "Dependency",
    "DisplacedWork",
    "Job",
    "JobQuerySet",
    "LearnedDuration",
    "MemberShare",
    "Move",
    "PastPlace",
    "PastVerdict",
    "ProjectArtifacts",
    "ProjectLogs",
    "Queue",
    "QueueCount",
    "QueueEvent",
    "QueueHour",
    "QueueSlot",
    "QueueSpan",
    "RemovedRun",
    "RemovedSpend",
    "RemovedUsage",
    "Run",
    "RunActivity",
    "RunArtifacts",
    "RunEvent",
    "ServiceHealth",
    "StartEstimate",
    "StartScore",
    "StatusCount",
    "Sweep",
    "SweepCount",
    "UsageDay",
    "Verdict",
]
