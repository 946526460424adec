"""What runs can use beside the team's own hosts: offers of other backends, idle instances, and budgets."""

from __future__ import annotations

import datetime as dt
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from django.db.models import Q

from dstackweb.accounts.models import Project
from dstackweb.backends import registry
from dstackweb.backends.contract import Availability, Counted, Offer, SourceReading
from dstackweb.backends.hosts.fit import HOSTS
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.offers import catalog, refusals, sources
from dstackweb.runner.isolation import PROJECT, USER, isolates
from dstackweb.runs.codes import Unavailable
from dstackweb.runs.usage import spent_this_month
from dstackweb.scheduler.placement.limits import Budget
from dstackweb.scheduler.placement.offers import BackendOffers, may_miss
from dstackweb.scheduler.placement.room import PlacedOrder, Room
from dstackweb.spec.effective import EffectiveSpec, Requirements

log = logging.getLogger(__name__)

JOB_FIELDS = ("region", "instance_type", "price", "cpus", "memory_mib", "gpu_count")
INSTANCE_FIELDS = (*JOB_FIELDS, "gpu_name", "gpu_memory_mib")
"""What offers have in common with jobs and instances."""
SILENT_S = 60.0
"""An instance silent for longer is not offered: it may be gone."""
SPARE_S = 15.0
"""An instance with less idle time left is not offered: it may end before its agent polls."""


class OfferReader:
    """Offers of the enabled backends, each asked once for the same needs. Call `offers_for` outside transactions.

    An offer that was refused before, and that a placed run tries now, is busy for the others, unless `shares_trials`.
    """

    def __init__(self, *, shares_trials: bool = False) -> None:
        self._shares_trials = shares_trials
        self._tried_now: set[tuple[str, refusals.OfferKey]] | None = None
        others = Backend.objects.filter(enabled=True).exclude(kind__in=registry.host_kinds())
        self.backends = {backend.name: backend for backend in others}
        self._answers: dict[tuple[str, Requirements, str | None], catalog.CachedOffers | list[Offer]] = {}
        self._failed: dict[str, Unavailable] = {}

    def offers_for(self, spec: EffectiveSpec) -> BackendOffers:
        """Offers of the backends that the run names; without names, of all that cost nothing.

        A backend that fails is left out until the next pass, with the code of why. One of which a source is not known,
        such as throttled instance types of a region, says so where the run could use what that hides.
        """
        if spec.backends is None:
            names = [name for name in self.free() if self._refusal(name, spec) is None]
        else:
            names = [name for name in spec.backends if name != HOSTS]
        offers: list[Offer] = []
        failed: dict[str, Unavailable] = {}
        rooms: dict[str, Room] = {}
        for name in names:
            answer = self._refusal(name, spec) or self._answer(name, spec)
            if isinstance(answer, Unavailable):
                failed[name] = answer
                continue
            if isinstance(answer, list):
                offers += answer
                rooms[name] = self._rooms[name]
                continue
            offers += answer.offers
            if any(may_miss(spec, *unread) for unread in answer.unread):
                failed[name] = Unavailable.PARTLY_READ
        return BackendOffers(tuple(offers), failed, rooms)

    def order(self, placed: Sequence[Offer]) -> None:
        """Take what was placed from what is free, at all backends of its cluster."""
        for offer in placed:
            if not self._is_counted(offer.backend):
                continue
            cluster = registry.cluster(self.backends[offer.backend])
            beside = {name for name in self._rooms if registry.cluster(self.backends[name]) == cluster}
            self._rooms |= {name: self._rooms[name].take(offer) or self._rooms[name] for name in beside}
            self._answers = {key: answer for key, answer in self._answers.items() if key[0] not in beside}

    def _is_counted(self, name: str) -> bool:
        return self.backends[name].kind in registry.counted_kinds()

    @functools.cached_property
    def _rooms(self) -> dict[str, Room]:
        """The free capacity of each backend whose room is counted, by name; all are read together."""
        readings: list[tuple[Backend, Counted, SourceReading]] = []
        for backend in (backend for name, backend in self.backends.items() if self._is_counted(name)):
            driver = sources.driver_of(backend)
            if driver is not None and registry.is_counted(driver):
                readings.append((backend, driver, sources.read_all(backend, driver, [driver.key])[driver.key]))
        # The orders after the readings: what is placed between the two is then counted.
        orders = orders_by_cluster(min((reading.number for *_of, reading in readings), default=0))
        return {
            backend.name: Room.after(driver, reading, orders[registry.cluster(backend)])
            for backend, driver, reading in readings
        }

    def free(self) -> list[str]:
        """The backends that cost nothing, which runs use without naming them."""
        return [name for name, backend in self.backends.items() if not registry.costs_money(backend)]

    def _refusal(self, name: str, spec: EffectiveSpec) -> Unavailable | None:
        """Why a backend whose jobs share a user takes no run of this project; None if it does, or there is none."""
        backend = self.backends.get(name)
        if backend is None or backend.kind not in registry.KINDS or (own := registry.projects(backend)) is None:
            return None
        if spec.project not in own:
            return Unavailable.OTHER_PROJECT
        isolation = PROJECT if len(own) == 1 else USER
        return None if isolates(isolation, spec.least_isolation) else Unavailable.TOO_LITTLE_ISOLATION

    def _answer(self, name: str, spec: EffectiveSpec) -> catalog.CachedOffers | list[Offer] | Unavailable:
        """A backend's offers: of what is free now where its room is counted, else as they are cached."""
        key = (name, spec.requirements, spec.image)
        if name not in self.backends:
            return Unavailable.NO_SUCH_BACKEND
        if name in self._failed or key in self._answers:
            return self._failed.get(name) or self._answers[key]
        backend = self.backends[name]
        try:
            if self._is_counted(name):
                free = self._rooms[name].offers(spec.requirements, image=spec.image)
                offers = refusals.mark_refused(backend, tuple(replace(offer, kind=backend.kind) for offer in free))
                self._answers[key] = list(map(self._unless_tried, offers))
            else:
                driver = catalog.CachedDriver(backend, wait_s=0)
                answer = driver.read(spec.requirements, image=spec.image)
                self._answers[key] = replace(answer, offers=tuple(map(self._unless_tried, answer.offers)))
            return self._answers[key]
        except registry.UnknownKind:
            self._failed[name] = Unavailable.NOT_SERVED
        except Exception as error:
            log.warning("backend %s: cannot list offers: %s: %s", name, type(error).__name__, error)
            self._failed[name] = Unavailable.FAILED
        return self._failed[name]

    def _unless_tried(self, offer: Offer) -> Offer:
        if self._shares_trials or not offer.detail.get("on_trial"):
            return offer
        if self._tried_now is None:
            requested = Instance.objects.select_related("backend").filter(status=InstanceStatus.REQUESTED)
            self._tried_now = {(row.backend.name, refusals.OfferKey.of(row)) for row in requested}
        if (offer.backend, refusals.OfferKey.of(offer)) not in self._tried_now:
            return offer
        return replace(offer, availability=Availability.BUSY, detail={**offer.detail, "code": "tried_now"})


def orders_by_cluster(number: int) -> defaultdict[tuple[str, str], list[PlacedOrder]]:
    """Return the orders that have not ended and that readings from this number on may not count, by cluster."""
    instances = Instance.objects.exclude(status=InstanceStatus.GONE).filter(backend__kind__in=registry.counted_kinds())
    # An order that was given up before it was sent has no token, and is at no cluster.
    unanswered = Q(cloud_id="") & (Q(status=InstanceStatus.REQUESTED) | ~Q(join_digest=""))
    orders: defaultdict[tuple[str, str], list[PlacedOrder]] = defaultdict(list)
    uncounted = instances.filter(unanswered | Q(answered_at_reading__gte=number)).select_related("backend")
    for instance in uncounted.order_by("created_at", "pk"):
        answered_at = instance.answered_at_reading if instance.cloud_id else None
        orders[registry.cluster(instance.backend)].append(PlacedOrder(instance, answered_at))
    return orders


def project_budget(project_id: int, now: dt.datetime) -> Budget | None:
    """What a project may spend in the current month and what it has spent; None without a budget."""
    limit = Project.objects.values_list("monthly_budget", flat=True).get(pk=project_id)
    return None if limit is None else Budget(limit, spent_this_month(project_id, now))


def idle_offers(now: dt.datetime) -> Callable[[int], Sequence[Offer]]:
    """A function that returns a project's idle instances as offers. Rows are read once, on the first call."""
    by_project = functools.cache(lambda: _idle_by_project(now))
    return lambda project_id: by_project().get(project_id, ())


def _idle_by_project(now: dt.datetime) -> dict[int, list[Offer]]:
    found: defaultdict[int, list[Offer]] = defaultdict(list)
    # `exclude(GONE)` matches a partial index: without it SQLite scans all instances there ever were.
    there = Instance.objects.select_related("backend").exclude(status=InstanceStatus.GONE)
    kept = there.filter(
        status=InstanceStatus.RUNNING,
        holder=None,
        interrupted_at=None,
        silent_s__lt=SILENT_S,
        idle_until__gt=now + dt.timedelta(seconds=SPARE_S),
        backend__enabled=True,
        backend__deleted_at=None,
    )
    for instance in kept.order_by("created_at", "pk"):
        if len(instance.gpus) >= instance.gpu_count:
            found[instance.project_id].append(_offer(instance))
    return dict(found)


def _offer(instance: Instance) -> Offer:
    return Offer(
        backend=instance.backend.name,
        spot=instance.is_spot,
        availability=Availability.IDLE,
        detail={
            "code": "idle_instance",
            "instance": str(instance.pk),
            "fits": 1,
            "runs_images": registry.runs_images(instance.backend),
        },
        **{name: getattr(instance, name) for name in INSTANCE_FIELDS},
    )
