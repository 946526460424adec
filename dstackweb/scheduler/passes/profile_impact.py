"""What other settings of a profile would mean for the runs that wait with it now, if they were submitted again. One run
stands for all of its shape. Stores nothing."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from dstackweb.gpus.rollout import using
from dstackweb.lib.errors import DomainError
from dstackweb.profiles.models import Profile
from dstackweb.profiles.resolve import ProfileData, resolve
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import Run
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.cloud.backend_offers import OfferReader
from dstackweb.scheduler.passes import loading
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.hosts import Wait
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.run_fields import ProfileFields
from dstackweb.spec.run_file import parse_run_file

MOST_RUNS = 5000
MOST_SHAPES = 100
"""That are decided, those of the most runs first."""


@dataclass(frozen=True)
class Affected:
    """Waiting runs of one shape: one of them, how many there are, and why they can never start."""

    run: Run
    runs: int
    wait: Wait


@dataclass
class Impact:
    """`waiting` runs use the profile (`more`: and others), of which `unchecked` could not be resolved; `changed` has
    for each key how many would get another value. Those in `impossible` could start only as they are, in `freed` only
    then."""

    waiting: int = 0
    more: bool = False
    unchecked: int = 0
    changed: Counter[str] = field(default_factory=Counter)
    impossible: list[Affected] = field(default_factory=list)
    freed: list[Affected] = field(default_factory=list)


def impact(profile: Profile, fields: ProfileFields, now: dt.datetime) -> Impact:
    """What `fields` in the place of the profile's settings would mean for the runs that wait with it."""
    waiting = using(profile).filter(status__in=(RunStatus.SUBMITTED, RunStatus.PENDING)).order_by("-pk")
    rows = list(waiting.values_list("pk", "shape")[: MOST_RUNS + 1])
    found = Impact(waiting=len(rows[:MOST_RUNS]), more=len(rows) > MOST_RUNS)
    by_shape: dict[str, list[int]] = defaultdict(list)
    for pk, shape in rows[:MOST_RUNS]:
        by_shape[shape].append(pk)
    shapes = sorted(by_shape.values(), key=len, reverse=True)
    found.unchecked = sum(map(len, shapes[MOST_SHAPES:]))
    first = Run.objects.select_related("project", "queue__project").in_bulk([pks[0] for pks in shapes[:MOST_SHAPES]])
    queues = {run.queue_id: run.queue for run in first.values()}
    capacity = loading.load_capacity(list(queues.values()), OfferReader(), now, loading.load_reservations())
    for pks in shapes[:MOST_SHAPES]:
        if (run := first.get(pks[0])) is not None:
            _add(found, run, len(pks), ProfileData(profile.name, fields), capacity)
    return found


def _add(found: Impact, run: Run, runs: int, profile: ProfileData, capacity: Capacity) -> None:
    try:
        before = EffectiveSpec.model_validate(run.spec)
        after = _again(run, profile)
    except (DomainError, ValidationError):
        found.unchecked += runs
        return
    old, new = before.as_file(), after.as_file()
    found.changed.update({key: runs for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)})
    was, would = _never(run, before, capacity), _never(run, after, capacity)
    if would and not was:
        found.impossible.append(Affected(run, runs, would))
    elif was and not would:
        found.freed.append(Affected(run, runs, was))


def _again(run: Run, profile: ProfileData) -> EffectiveSpec:
    """The run's settings with this profile. Raises DomainError for a file that can't be read again."""
    spec: Mapping[str, Any] = run.spec
    given = dict.fromkeys(spec.get("masked_env", ()), "")  # copied from a shell that is not here
    after = resolve(parse_run_file(run.config_text, client_env=given), profile).spec
    kept = {name: getattr(EffectiveSpec.model_validate(spec), name) for name in _ITS_OWN}
    return after.model_copy(update=kept)


_ITS_OWN = ("name", "priority", "queue", "env", "masked_env", "hold", "least_isolation", "project", "array")
"""What a profile never sets, or people changed since."""


def _never(run: Run, spec: EffectiveSpec, capacity: Capacity) -> Wait | None:
    """Why it could never start, if so."""
    first = next(iter(capacity.blockers(loading.waiting_run(run, run.queue, spec))), None)
    return first if first is not None and first.reason == WaitReason.IMPOSSIBLE else None
