"""What runs can use beside the team's own hosts: the offers of other backends, and the budget to pay for them."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Sequence

from dstackweb.accounts.models import Project
from dstackweb.backends import registry
from dstackweb.backends.contract import Offer
from dstackweb.backends.models import Backend
from dstackweb.offers import catalog
from dstackweb.runs.codes import Unavailable
from dstackweb.runs.spend import spent_this_month
from dstackweb.scheduler.placement.capacity import Budget
from dstackweb.scheduler.placement.hosts import HOSTS
from dstackweb.scheduler.placement.offers import BackendOffers
from dstackweb.spec.effective import EffectiveSpec, Requirements

log = logging.getLogger(__name__)


class OfferReader:
    """Offers of the enabled backends, each asked once for the same needs. Call `offers_for` outside transactions."""

    def __init__(self) -> None:
        others = Backend.objects.filter(enabled=True).exclude(kind__in=registry.host_kinds())
        self.backends = {backend.name: backend for backend in others}
        self._answers: dict[tuple[str, Requirements, str | None], Sequence[Offer]] = {}
        self._failed: dict[str, Unavailable] = {}

    def offers_for(self, spec: EffectiveSpec) -> BackendOffers:
        """Offers of the backends that the run names; without names, of all that cost nothing.

        A backend that fails is left out until the next pass, with the code of why.
        """
        if spec.backends is None:
            names = [name for name, backend in self.backends.items() if not registry.costs_money(backend)]
        else:
            names = [name for name in spec.backends if name != HOSTS]
        offers: list[Offer] = []
        failed: dict[str, Unavailable] = {}
        for name in names:
            answer = self._answer(name, spec)
            if isinstance(answer, Unavailable):
                failed[name] = answer
            else:
                offers += answer
        return BackendOffers(tuple(offers), failed)

    def _answer(self, name: str, spec: EffectiveSpec) -> Sequence[Offer] | Unavailable:
        key = (name, spec.requirements, spec.image)
        if name not in self.backends:
            return Unavailable.NO_SUCH_BACKEND
        if name not in self._failed and key not in self._answers:
            self._read(name, key)
        return self._failed[name] if name in self._failed else self._answers[key]

    def _read(self, name: str, key: tuple[str, Requirements, str | None]) -> None:
        _, requirements, image = key
        try:
            self._answers[key] = catalog.driver(self.backends[name], wait_s=0).offers(requirements, image=image)
        except registry.UnknownKind:
            self._failed[name] = Unavailable.NOT_SERVED
        except Exception as error:
            log.warning("backend %s: cannot list offers: %s: %s", name, type(error).__name__, error)
            self._failed[name] = Unavailable.FAILED


def project_budget(project_id: int, now: dt.datetime) -> Budget | None:
    """What a project may spend in the current month and what it has spent; None without a budget."""
    limit = Project.objects.values_list("monthly_budget", flat=True).get(pk=project_id)
    return None if limit is None else Budget(limit, spent_this_month(project_id, now))
