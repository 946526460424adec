"""Offers of hosts and clouds for a project's runs, and manual refresh."""

from __future__ import annotations

from django.http import HttpRequest
from django.utils import timezone
from ninja import P, Path, QueryEx, Router

from dstackweb.api.app import project_of
from dstackweb.api.offer_schemas import OffersOut, RefreshIn, RefreshOut, SourceOut, offer_out
from dstackweb.api.schemas import ErrorOut
from dstackweb.backends import registry
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid
from dstackweb.offers import filters, listing, refreshing
from dstackweb.scheduler.cloud import idle
from dstackweb.scheduler.placement.offers import matching_idle

router = Router(tags=["offers"])
REFUSALS = {401: ErrorOut, 403: ErrorOut, 404: ErrorOut, 422: ErrorOut}
QUERY = ("query",)
Several = QueryEx[list[str] | None, P(description="Repeat or separate by commas")]


@router.get("", response={200: OffersOut, **REFUSALS}, summary="Offers, the cheapest first")
def offers(
    request: HttpRequest,
    project: Path[str],
    gpu: QueryEx[str, P(description="As in a run file: `A100:1..`, `A100,H100:40GB..:2`, `24GB..`")] = "",
    cpu: QueryEx[str, P(description="As in a run file: `4..`")] = "",
    memory: QueryEx[str, P(description="As in a run file: `16GB..`")] = "",
    region: Several = None,
    spot: QueryEx[str, P(description="`true`, `false`; without it, or `auto`, both")] = "",
    max_price: QueryEx[str, P(description="USD per hour")] = "",
    backend: Several = None,
    sort: QueryEx[str, P(description=f"{', '.join(filters.SORTS)}; `-price` for the largest first")] = "price",
    limit: QueryEx[int, P(ge=1, le=2000)] = 500,
    cursor: str = "",
) -> OffersOut:
    """Offers for one node of a run with these `resources`, including unavailable ones.

    Answers from what is kept, and never waits for a cloud; `sources` says how old that is. Own hosts cost nothing. A
    machine that stands idle for the project's next run is `idle`, with its `instance` in `detail`.
    """
    owner, _role = project_of(request, project)
    order = filters.read_order(sort, within=QUERY)
    wanted = filters.read(
        gpu=gpu, cpu=cpu, memory=memory, regions=region or (), backends=backend or (), spot=spot, max_price=max_price,
        within=QUERY,
    )  # fmt: skip
    now = timezone.now()
    found = listing.find_offers(wanted, now)
    kept = matching_idle(idle.reader(now)(owner.pk), wanted.requirements)
    all_offers = [*found.offers, *filter(wanted.takes, kept)]
    items, following = filters.page(all_offers, order, limit, cursor, within=QUERY)
    return OffersOut(
        items=[offer_out(offer, wanted.requirements) for offer in items],
        next=following,
        total=len(all_offers),
        sources=[SourceOut.of(age) for age in found.sources],
    )


@router.post("/refresh", response={200: RefreshOut, **REFUSALS, 429: ErrorOut}, summary="Refresh offers")
def refresh(request: HttpRequest, project: Path[str], body: RefreshIn | None = None) -> RefreshOut:
    """Refresh all sources in the background. Until then the known offers are used, marked as stale.

    Each backend at most once in 10 s: with none left to ask, this answers 429.
    """
    project_of(request, project, "member")
    clouds = {
        found.name: found for found in Backend.objects.filter(enabled=True).exclude(kind__in=registry.host_kinds())
    }
    named = body.backends if body is not None and body.backends is not None else list(clouds)
    for place, name in enumerate(named):
        if name not in clouds:
            raise Invalid.at("backends", place, msg=f"there is no enabled cloud backend {name[:80]!r}")
    asked = refreshing.refresh((clouds[name] for name in dict.fromkeys(named)), timezone.now())
    return RefreshOut(items=[found.name for found in asked])
