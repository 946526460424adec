"""Several runs of one file, which may wait for each other: all are stored, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from django.db import IntegrityError
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Invalid
from dstackweb.runs import services
from dstackweb.runs.models import Run, Sweep
from dstackweb.runs.queue.queues import lock_queue
from dstackweb.runs.services import PreparedSubmission, Submission
from dstackweb.runs.shared_rows import shared_rows_last
from dstackweb.runs.states import ACTIVE
from dstackweb.runs.sweeps import services as sweeps
from dstackweb.spec.pipeline import Cycle, Part, in_order, split
from dstackweb.spec.run_file import parse_run_file


@dataclass(frozen=True)
class Step:
    """One run of a file: what was submitted for it, parsed and checked."""

    part: Part
    submission: Submission
    prepared: PreparedSubmission

    @property
    def name(self) -> str:
        return self.prepared.effective.spec.name or ""

    @property
    def waits_for(self) -> dict[str, int]:
        """The runs of the same file that it waits for, with their numbers in its `after`."""
        found = {one.name for one in self.prepared.dependencies if one.of is None}
        after = self.prepared.effective.spec.after
        return {one.run: number for number, one in enumerate(after) if one.run in found}

    def wrong(self, *loc: str | int, msg: str) -> Invalid:
        """An error at a key of its file."""
        line = self.prepared.run_file.line(".".join(map(str, loc))) or self.prepared.run_file.line(str(loc[0]))
        return self.part.at(*loc, msg=msg, line=line)


def submit(
    project: Project, user: User, role: str, submission: Submission, idempotency_key: str = ""
) -> tuple[Run | Sweep | list[Run], bool]:
    """Submit what a file has: a run, a sweep, or several runs. Returns it, and whether this call created it.

    Raises what `services.submit` raises; then nothing of the file was stored.
    """
    parts = split(submission.config)
    if len(parts) == 1:
        one = replace(submission, config=parts[0].config)
        return sweeps.submit(project, user, role, one, idempotency_key)
    if idempotency_key and (earlier := _replayed(project, user, submission, parts, idempotency_key)):
        return earlier, False
    steps = prepare(project, user, role, submission)
    runs = {
        step.name: services.new_run(
            project, user, step.prepared, step.submission, _key(idempotency_key, parts.index(step.part))
        )
        for step in steps
    }
    try:
        with shared_rows_last():
            for queue_id in sorted({step.prepared.queue.pk for step in steps}):
                lock_queue(queue_id)
            for step in steps:
                for dependency in step.prepared.dependencies:
                    if dependency.of is None:
                        dependency.predecessor = runs[dependency.name]
                services.store(runs[step.name], step.prepared)
    except IntegrityError:
        if idempotency_key and (earlier := _replayed(project, user, submission, parts, idempotency_key)):
            return earlier, False
        taken = Run.objects.filter(project=project, name__in=runs, status__in=ACTIVE).values_list("name", flat=True)
        raise services.name_taken(project, next(iter(taken), steps[0].name)) from None
    return list(runs.values()), True


def prepare(project: Project, user: User, role: str, submission: Submission) -> list[Step]:
    """Parse and check each run of a file, and return them so that each comes after those it waits for.

    Stores nothing. Raises what `services.prepare` raises, with the lines of the whole file, and Invalid for a cycle.
    """
    parts = split(submission.config)
    if len(parts) == 1:
        one = replace(submission, config=parts[0].config)
        return [Step(parts[0], one, services.prepare(project, user, role, one))]
    if "name" in submission.overrides:
        raise Invalid.at("name", msg=_("the runs of a file with several can't be renamed on the command line"))
    names = _names(parts, submission)
    steps = {name: _step(project, user, role, submission, part, names) for name, part in zip(names, parts, strict=True)}
    try:
        return [steps[name] for name in in_order({name: list(step.waits_for) for name, step in steps.items()})]
    except Cycle as cycle:
        last = steps[cycle.path[-1]]
        number = last.waits_for[cycle.path[-2]]
        raise last.wrong("after", number, msg=_("these runs wait for each other: %s") % cycle) from None


def _names(parts: Sequence[Part], submission: Submission) -> list[str]:
    """The names of a file's runs. Raises Invalid for a run without one, or with that of another."""
    names: list[str] = []
    for part in parts:
        with _placed(part):
            run_file = parse_run_file(part.config, client_env=submission.env, overrides=submission.overrides)
        line = run_file.line("name") or run_file.line("type")
        if not run_file.fields.name:
            raise part.at("name", msg=_("each run of a file with several needs a `name`"), line=line)
        if run_file.fields.name in names:
            raise part.at("name", msg=_("two runs of the file are named %s") % run_file.fields.name, line=line)
        if run_file.fields.array is not None:
            msg = _("a sweep can't be one of several runs in a file. Submit it by itself")
            raise part.at("array", msg=msg, line=run_file.line("array"))
        names.append(run_file.fields.name)
    return names


def _step(project: Project, user: User, role: str, whole: Submission, part: Part, names: Sequence[str]) -> Step:
    submission = replace(whole, config=part.config, part_of=whole.digest())
    with _placed(part):
        return Step(part, submission, services.prepare(project, user, role, submission, names))


@contextmanager
def _placed(part: Part) -> Iterator[None]:
    """Give errors the lines of the whole file."""
    try:
        yield
    except Invalid as error:
        raise part.placed(error) from None


def _replayed(project: Project, user: User, whole: Submission, parts: Sequence[Part], key: str) -> list[Run]:
    """The runs created with this key before. Raises Conflict if that was a different submission."""
    submissions = [replace(whole, config=part.config, part_of=whole.digest()) for part in parts]
    found = (services.replayed(project, user, _key(key, at), one) for at, one in enumerate(submissions))
    return [run for run in found if run is not None]


def _key(key: str, at: int) -> str:
    """The key of one of the runs: that of the request for the first one."""
    return hashlib.sha256(f"{key}\n{at}".encode()).hexdigest() if key and at else key
