"""The lines of the queue that a form names: runs, as `id.etag`, and folds of sweeps (`FoldKey`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from django.http import QueryDict
from django.utils.translation import gettext as _

from dstackweb.lib.errors import Invalid, NotFound
from dstackweb.lib.forms import whole_number
from dstackweb.runs.models import Queue, Run, Sweep
from dstackweb.runs.queue.folding import FoldKey
from dstackweb.runs.queue.folds import runs_of
from dstackweb.runs.queue.move_preview import MoveEffect
from dstackweb.runs.sweeps.selectors import find_sweeps

AT_MOST = 500
"""Lines that one request may name; a page shows fewer."""


@dataclass(frozen=True)
class Picked:
    """`runs` are all of them, in the form's order. Folds have no etags: those of their runs that wait now are meant."""

    runs: list[Run]
    etags: dict[int, str] | None
    folds: Mapping[FoldKey, Sequence[Run]] = field(default_factory=dict)

    @property
    def single(self) -> list[Run]:
        """Those that are lines of their own."""
        folded = {run.pk for runs in self.folds.values() for run in runs}
        return [run for run in self.runs if run.pk not in folded]

    def sweeps(self) -> list[Sweep]:
        """The sweeps of the folds."""
        return find_sweeps({key.sweep_id for key in self.folds})

    def places(self, effect: MoveEffect) -> dict[str, int | None]:
        """The new positions of all lines, by what the page calls them."""
        after = {change.run.pk: change.position_after for change in (*effect.changes, *effect.slips)}
        firsts = {str(key): [at for run in runs if (at := after.get(run.pk))] for key, runs in self.folds.items()}
        return {str(pk): at for pk, at in after.items()} | {key: min(at) for key, at in firsts.items() if at}


def read_picked(form: QueryDict, queue: Queue) -> Picked:
    """Raises Invalid without any, NotFound when none of them is in the queue's project."""
    tokens = [token for token in ",".join(form.getlist("run")).split(",") if token][:AT_MOST]
    if not tokens:
        raise Invalid.at("run", msg=_("select at least one run"))
    return pick(queue, tokens)


def pick(queue: Queue, tokens: Sequence[str]) -> Picked:
    """The lines with these tokens. Raises NotFound as `read_picked` does."""
    folds = {key: list(runs_of(queue, key)) for token in tokens if (key := FoldKey.parse(token)) is not None}
    parts = {token: token.partition(".") for token in tokens if FoldKey.parse(token) is None}
    found = Run.objects.select_related("queue", "project", "user").in_bulk(
        {whole_number(key) for key, _dot, _etag in parts.values()}
    )
    runs: dict[int, Run] = {}
    for token in tokens:
        key = FoldKey.parse(token)
        if key is not None:
            runs |= {run.pk: run for run in folds[key]}
        elif (run := found.get(whole_number(parts[token][0]))) and run.project_id == queue.project_id:
            runs[run.pk] = run
    if not runs:
        raise NotFound(_("these runs are no longer in this queue"))
    etags = {whole_number(pk): etag for pk, _dot, etag in parts.values() if etag}
    return Picked(list(runs.values()), etags or None, folds)
