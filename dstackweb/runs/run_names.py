"""Names of runs and sweeps: which are taken, and those of runs that are submitted without one.

Active runs and sweeps share their names: people and commands name either without saying which.
"""

from __future__ import annotations

import random
from collections.abc import Collection

from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import Conflict
from dstackweb.runs.models import Run, Sweep
from dstackweb.runs.states import ACTIVE

ADJECTIVES = (
    "amber", "brave", "bright", "calm", "clever", "crisp", "eager", "early", "fair", "fast", "fresh",
    "gentle", "grand", "happy", "keen", "kind", "light", "lively", "lucky", "mellow", "merry", "mild", "neat",
    "nimble", "noble", "plain", "proud", "quick", "quiet", "rapid", "ready", "sharp", "shiny", "silver",
    "sleek", "smart", "smooth", "snug", "solid", "steady", "sunny", "sweet", "swift", "tidy", "vivid", "warm",
    "wise", "witty", "young",
)  # fmt: skip
NOUNS = (
    "badger", "beaver", "bison", "bobcat", "condor", "crane", "dolphin", "eagle", "falcon", "ferret", "finch",
    "fox", "gecko", "gull", "hare", "hawk", "heron", "ibis", "jackal", "jay", "koala", "lark", "lemur",
    "lynx", "marten", "mole", "moose", "moth", "newt", "ocelot", "orca", "osprey", "otter", "owl", "panda",
    "petrel", "puffin", "quail", "raven", "robin", "seal", "shrew", "sparrow", "stork", "swan", "tapir",
    "tern", "toad", "vole", "walrus", "wren", "yak",
)  # fmt: skip


def random_name(rnd: random.Random) -> str:
    """A name such as `swift-otter-417`; of some 2.5 million."""
    return f"{rnd.choice(ADJECTIVES)}-{rnd.choice(NOUNS)}-{rnd.randint(1, 999)}"


def run_name(sweep: str, index: int) -> str:
    return f"{sweep}-{index}"


def is_taken(project: Project, name: str) -> bool:
    """Whether an active run or sweep has this name."""
    is_run = Run.objects.filter(project=project, name=name, status__in=ACTIVE).exists()
    return is_run or name in names_of_sweeps(project, [name])


def names_of_sweeps(project: Project, names: Collection[str]) -> set[str]:
    """Those of these names that active sweeps have."""
    return set(Sweep.objects.filter(project=project, name__in=names, ended_at=None).values_list("name", flat=True))


def name_taken(project: Project, name: str) -> Conflict:
    if names_of_sweeps(project, [name]):
        msg = _(
            "a sweep named %(name)s has not ended. Nothing was submitted. Choose another name, or stop that sweep."
        ) % {"name": repr(name)}
        return Conflict(msg, name=name)
    holder = Run.objects.filter(project=project, name=name, status__in=ACTIVE).first()
    status = holder.status if holder else "active"
    return Conflict(
        _("a run named %(name)s is already %(status)s. Nothing was submitted. Choose another name, or stop that run.")
        % {"name": repr(name), "status": status},
        name=name,
    )


def free_name(project: Project, prefix: str = "") -> str:
    """A random name that no run has."""
    rnd = random.Random()
    for _attempt in range(20):
        name = prefix + random_name(rnd)
        if not Run.objects.filter(project=project, name=name).exists():
            return name
    return f"{prefix}{random_name(rnd)}-{rnd.randint(1000, 9999)}"
