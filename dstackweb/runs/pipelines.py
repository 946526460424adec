"""Several runs or sweeps of one file, which may wait for each other: all are stored, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from django.db import IntegrityError
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, Invalid
from dstackweb.runs import run_names, services
from dstackweb.runs.models import Run, Sweep
from dstackweb.runs.queue.queues import lock_queue
from dstackweb.runs.run_names import run_name
from dstackweb.runs.services import PreparedSubmission, Submission
from dstackweb.runs.shared_rows import shared_rows_last
from dstackweb.runs.states import ACTIVE
from dstackweb.runs.sweeps import services as sweeps
from dstackweb.spec.array import Array
from dstackweb.spec.run_file import Cycle, PipelineFile, in_order, parse_run_file, split


@dataclass(frozen=True)
class Step:
    """One run or sweep of a file: what was submitted for it, parsed and checked."""

    part: PipelineFile
    submission: Submission
    prepared: PreparedSubmission

    @property
    def name(self) -> str:
        return self.prepared.effective.spec.name or ""

    @property
    def waits_for(self) -> dict[str, int]:
        """The runs and sweeps of the same file that it waits for, with their numbers in its `after`."""
        found = {one.name for one in self.prepared.dependencies if one.of is None}
        after = self.prepared.effective.spec.after
        return {one.run: number for number, one in enumerate(after) if one.run in found}

    def wrong(self, *loc: str | int, msg: str) -> Invalid:
        """An error at a key of its file."""
        line = self.prepared.run_file.line(".".join(map(str, loc))) or self.prepared.run_file.line(str(loc[0]))
        return self.part.at(*loc, msg=msg, line=line)


def submit(
    project: Project, user: User, role: str, submission: Submission, idempotency_key: str = ""
) -> tuple[Run | Sweep | list[Run | Sweep], bool]:
    """Submit what a file has, all or nothing, as `services.submit`. Returns it, and whether this call created it."""
    parts = split(submission.config)
    if len(parts) == 1:
        one = replace(submission, config=parts[0].config)
        return sweeps.submit(project, user, role, one, idempotency_key)
    if idempotency_key and (earlier := _replayed(project, user, submission, parts, idempotency_key)):
        return earlier, False
    steps = prepare(project, user, role, submission)
    made = {step.name: _new(project, user, step, _key(idempotency_key, parts.index(step.part))) for step in steps}
    try:
        with shared_rows_last():
            for queue_id in sorted({step.prepared.queue.pk for step in steps}):
                lock_queue(queue_id)
            for step in steps:
                _store(step, made)
    except IntegrityError:
        if idempotency_key and (earlier := _replayed(project, user, submission, parts, idempotency_key)):
            return earlier, False
        raise _name_taken(project, made) from None
    return list(made.values()), True


def _new(project: Project, user: User, step: Step, key: str) -> Run | Sweep:
    """What a step makes, not stored."""
    if step.prepared.effective.spec.array is None:
        return services.new_run(project, user, step.prepared, step.submission, key)
    with _placed(step.part):
        return sweeps.new_sweep(project, user, step.prepared, step.submission, key)


def _store(step: Step, made: Mapping[str, Run | Sweep]) -> None:
    """Store what a step makes, behind those that it waits for."""
    for dependency in step.prepared.dependencies:
        if dependency.of is None:
            before = made[dependency.name]
            dependency.predecessor = before if isinstance(before, Run) else None
            dependency.sweep = before if isinstance(before, Sweep) else None
    mine = made[step.name]
    if isinstance(mine, Run):
        services.store(mine, step.prepared)
    else:
        sweeps.store(mine, step.prepared)


def _name_taken(project: Project, made: Mapping[str, Run | Sweep]) -> Conflict:
    named = [name for name, one in made.items() if isinstance(one, Sweep)]
    taken = Sweep.objects.filter(project=project, name__in=named, ended_at=None).values_list("name", flat=True)
    if sweep := next(iter(taken), None):
        return sweeps.name_taken(project, sweep)
    active = Run.objects.filter(project=project, name__in=made, status__in=ACTIVE).values_list("name", flat=True)
    if run := next(iter(active), None):
        return run_names.name_taken(project, run)
    return sweeps.name_taken(project, named[0]) if named else run_names.name_taken(project, next(iter(made)))


def prepare(project: Project, user: User, role: str, submission: Submission) -> list[Step]:
    """Parse and check each run and sweep of a file, and return them so that each comes after those it waits for.

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


def _names(parts: Sequence[PipelineFile], submission: Submission) -> list[str]:
    """The names of what a file has. Raises Invalid for a part without one, or with that of another."""
    lines: dict[str, int | None] = {}
    sizes: dict[str, int] = {}
    for part in parts:
        with _placed(part):
            run_file = parse_run_file(part.config, client_env=submission.env, overrides=submission.overrides)
        name, line = run_file.fields.name, run_file.line("name") or run_file.line("type")
        if not name:
            raise part.at("name", msg=_("each run of a file with several needs a `name`"), line=line)
        if name in lines:
            raise part.at("name", msg=_("two runs of the file are named %s") % name, line=line)
        lines[name] = line
        if run_file.fields.array is not None:
            sizes[name] = Array.of(run_file.fields.array).size
    for part, name in zip(parts, lines, strict=True):
        sweep, _dash, index = name.rpartition("-")
        if index.isdecimal() and name == run_name(sweep, int(index)) and int(index) < sizes.get(sweep, 0):
            msg = _("%(name)s is also the name of a run of the file's sweep %(sweep)s") % {"name": name, "sweep": sweep}
            raise part.at("name", msg=msg, line=lines[name])
    return list(lines)


def _step(project: Project, user: User, role: str, whole: Submission, part: PipelineFile, names: Sequence[str]) -> Step:
    submission = replace(whole, config=part.config, part_of=whole.digest())
    with _placed(part):
        return Step(part, submission, services.prepare(project, user, role, submission, names))


@contextmanager
def _placed(part: PipelineFile) -> Iterator[None]:
    """Give errors the lines of the whole file."""
    try:
        yield
    except Invalid as error:
        raise part.placed(error) from None


def _replayed(
    project: Project, user: User, whole: Submission, parts: Sequence[PipelineFile], key: str
) -> list[Run | Sweep]:
    """The runs and sweeps created with this key before. Raises Conflict if that was a different submission."""
    submissions = [replace(whole, config=part.config, part_of=whole.digest()) for part in parts]
    found = (sweeps.replayed(project, user, _key(key, at), one) for at, one in enumerate(submissions))
    return [one for one in found if one is not None]


def _key(key: str, at: int) -> str:
    """The key of one of them: that of the request for the first one."""
    return hashlib.sha256(f"{key}\n{at}".encode()).hexdigest() if key and at else key
