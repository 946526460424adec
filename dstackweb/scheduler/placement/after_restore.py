"""What becomes of jobs that a restored database does not know, though they were started after its backup. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from dstackweb.runs.states import PLACED, WAITING


@dataclass(frozen=True)
class StartedJob:
    """A job as its host has named it. `ended`: its commands have, and its runner's files say how."""

    id: str
    host_id: int
    attempt: int
    node: int
    nodes: int
    cpus: int
    memory_mib: int
    gpus: tuple[str, ...]
    nonce: str
    ended: bool


class Step(Enum):
    NOTHING = "nothing"
    """They are of no use to the run: their runners end what is left of them."""
    WAIT = "wait"
    """The run's attempt, or another node of theirs, may still be reported."""
    END_ATTEMPT = "end attempt"
    """A later attempt has begun, so the one that the database has is over. Decide again then."""
    TAKE = "take"
    """The run is placed where they are, and goes on or ends as their runners say."""
    TAKE_AND_END = "take and end"
    """The same, but a node is missing: the attempt was interrupted."""


def decide(
    status: str, attempt: int, jobs: Collection[StartedJob], *, is_last: bool
) -> tuple[Step, Sequence[StartedJob]]:
    """Decide what to do about the unknown `jobs` of a run, and with which of them. `is_last`: the wait is over.

    Only the newest attempt counts: one begins when all jobs of the one before have ended.
    """
    newest = max((job.attempt for job in jobs), default=0)
    if status in PLACED and newest > attempt:
        return (Step.END_ATTEMPT if is_last else Step.WAIT), ()
    if status not in WAITING or newest < attempt:
        return Step.NOTHING, ()
    # One backup may have been restored twice, and a node been started after each: one that has ended counts.
    by_node = {job.node: job for job in sorted(jobs, key=lambda job: job.ended) if job.attempt == newest}
    of_attempt = [by_node[node] for node in sorted(by_node)]
    if len(of_attempt) == of_attempt[0].nodes:
        return Step.TAKE, of_attempt
    return (Step.TAKE_AND_END, of_attempt) if is_last else (Step.WAIT, ())
