"""What a run or sweep waits for, and what waits for it, as a small graph on its page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dstackweb.runs import selectors
from dstackweb.runs.codes import DependencyOutcome
from dstackweb.runs.models import Dependency, Run, Sweep
from dstackweb.runs.states import RunStatus
from dstackweb.spec.codes import On
from dstackweb.web.common.pages import fingerprint
from dstackweb.wording.sentence import words

SHOWN = 8
"""Runs on each side."""

condition = words({On.DONE: "", On.FAILED: gettext_lazy("if it fails"), On.ENDED: gettext_lazy("once it has ended")})


class GraphNode(NamedTuple):
    """A run or sweep of the graph. `uid` is empty once it was removed; `status` then as well."""

    name: str
    uid: str
    status: str
    note: str
    is_sweep: bool


@dataclass(frozen=True)
class Graph:
    """`more_before` and `more_behind` count runs that are not listed."""

    before: list[GraphNode]
    behind: list[GraphNode]
    more_before: int
    more_behind: bool
    release_url: str
    """Empty unless it can be released."""


def dependency_graph(run: Run | Sweep) -> Graph | None:
    """None for one that neither waits for others nor is waited for."""
    before, behind = selectors.dependencies_of(run), selectors.followers_of(run, SHOWN + 1)
    if not before and not behind:
        return None
    address = "web:sweep-release" if isinstance(run, Sweep) else "web:release"
    undecided = any(one.outcome in (DependencyOutcome.WAITING, DependencyOutcome.UNMET) for one in before)
    return Graph(
        list(_nodes((one, one.of) for one in before[:SHOWN])),
        list(_nodes((one, one.follower) for one in behind[:SHOWN])),
        len(before[SHOWN:]),
        len(behind) > SHOWN,
        reverse(address, args=[run.project.name, run.uid]) if run.status == RunStatus.PENDING and undecided else "",
    )


def graph_stamp(run: Run | Sweep) -> str:
    """Changes with what the graph shows: with the ends and starts of others, which do not change the run itself."""
    graph = dependency_graph(run)
    return f".{fingerprint(graph)}" if graph else ""


def _nodes(found: Iterable[tuple[Dependency, Run | Sweep | None]]) -> Iterable[GraphNode]:
    for one, run in found:
        note = _("released") if one.outcome == DependencyOutcome.RELEASED else condition(one.on)
        if run is None:
            yield GraphNode(one.name, "", "", note, is_sweep=False)
        else:
            yield GraphNode(run.name, str(run.uid), run.status, note, is_sweep=isinstance(run, Sweep))
