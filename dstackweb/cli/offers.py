"""`dstackweb offers`, `quotas` and `cache`: what hosts and clouds offer, account quotas, and calls to clouds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.language import N_, _, _n, age_text, clock_text, listed, word
from dstackweb.cli.options import Json, Watch, flag
from dstackweb.cli.output import clean, note
from dstackweb.cli.tables import (
    Column,
    ItemColumns,
    Note,
    Rows,
    View,
    Warn,
    bar,
    show_found,
    watch_view,
)
from dstackweb.spec.units import memory_text, price_text

PRICE_BAR = 8
USED_BAR = 10
REFRESH_S = 20.0
"""How long a refresh is waited for; slower sources arrive later."""
WATCH_S = 5
SOURCES = {
    "instance_types": N_("instance types"),
    "prices": N_("prices"),
    "spot_prices": N_("spot prices"),
    "quotas": N_("quotas"),
    "quota_use": N_("use of quotas"),
    "subnets": N_("subnets"),
    "partitions": N_("partitions"),
    "nodes": N_("nodes"),
    "workers": N_("workers"),
}
"""What offers are made of. Others are shown as the server names them."""
WITHOUT_SOURCES = "offers"
"""The source of a backend that is read at each request."""

Backend = Annotated[str, typer.Argument(metavar="BACKEND", help=_("One backend; all if empty."))]
COUNTERS: ItemColumns = {
    Column("HITS", right=True): itemgetter("hits"),
    Column("MISSES", right=True): itemgetter("misses"),
    Column("COALESCED", right=True): itemgetter("coalesced"),
    Column("CALLS", right=True): itemgetter("calls"),
    Column("SAVED", right=True): itemgetter("saved"),
    Column("FAILURES", right=True): itemgetter("failures"),
    Column("THROTTLES", right=True): itemgetter("throttles"),
    Column("STALE", right=True): itemgetter("stale_served"),
}
"""Of a backend's figures, in total or of an hour."""
QUOTA_COLUMNS: ItemColumns = {
    Column("BACKEND"): itemgetter("backend"),
    Column("REGION"): itemgetter("region"),
    Column("QUOTA", wide=True): itemgetter("name"),
    Column("USED", right=True): lambda quota: "?" if quota["used"] is None else quota["used"],
    Column("LIMIT", right=True): itemgetter("limit"),
    Column(): lambda quota: bar(min(quota["used"] or 0, quota["limit"]), quota["limit"], USED_BAR),
}


def offers(
    gpu: Annotated[
        str, typer.Option(metavar="TEXT", help=_("As in a run file: A100:1.., A100,H100:40GB..:2, 24GB.."))
    ] = "",
    cpu: Annotated[str, typer.Option(metavar="TEXT", help=_("As in a run file: 4.."))] = "",
    memory: Annotated[str, typer.Option(metavar="TEXT", help=_("As in a run file: 16GB.."))] = "",
    region: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help=_("Only this region; repeat or separate by commas."))
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help=_("Only this backend; repeat or separate by commas."))
    ] = None,
    spot: Annotated[bool | None, flag("--spot/--on-demand", help=_("Only spot, or only on-demand."))] = None,
    max_price: Annotated[str, typer.Option(metavar="USD", help=_("Maximum price per hour."))] = "",
    sort: Annotated[
        str, typer.Option(metavar="KEY", help=_("price, gpu_price, gpu_memory, …; -KEY sorts descending."))
    ] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=2000, help=_("Maximum number of offers."))] = 20,
    refresh: Annotated[bool, flag("--refresh", help=_("Refresh offers from the clouds first."))] = False,
    follow: Watch = False,
    as_json: Json = False,
) -> None:
    """List what one node of a run could use, on hosts and clouds, the cheapest first."""
    options = {
        "gpu": gpu, "cpu": cpu, "memory": memory, "region": region, "backend": backend,
        "spot": None if spot is None else str(spot).lower(), "max_price": max_price, "sort": sort, "limit": limit,
    }  # fmt: skip
    query = {key: value for key, value in options.items() if value not in ("", None, [])}
    api = config.connect()
    path = api.in_project("offers")
    if refresh:
        _refresh(api, path)
    page = api.get(path, **query)
    if follow:
        watch_view(api, page, lambda: api.get(path, **query), view_of, every_s=WATCH_S, stopped="")
    else:
        show_found(page, view_of(page), as_json)


def view_of(page: dict[str, Any]) -> View:
    """A page of offers as a table; how many there are and how fresh they are."""
    if page["items"]:
        yield partial(table, page["items"], sources=page["sources"])
    yield from map(Note, remarks(page))
    yield from _ages_and_problems(page["sources"])


def _ages_and_problems(sources: list[dict[str, Any]]) -> View:
    return [*map(Note, ages(sources)), *map(Warn, problems(sources))]


def table(
    items: list[dict[str, Any]],
    width: int | None,
    without: Collection[str] = (),
    whole: bool = False,
    sources: Sequence[dict[str, Any]] = (),
) -> Rows:
    """The columns that a terminal `width` characters wide has room for; all where it is None.

    `sources` have the offers' ages.
    """
    highest = max(offer["price"] for offer in items)
    columns: dict[Column, tuple[int, Callable[[dict[str, Any]], object]]] = {
        Column("OFFER", wide=True): (0, _place),
        Column("CPU", right=True): (100, itemgetter("cpus")),
        Column("MEMORY", right=True): (100, lambda offer: memory_text(offer["memory_mib"])),
        Column("GPU"): (0, _gpus),
        Column("PRICE/H", right=True): (0, lambda offer: price_text(offer["price"]) if offer["price"] else "–"),
        Column("KIND"): (0, _kind),
        Column(): (90, lambda offer: bar(offer["price"], highest, PRICE_BAR)),
        Column("AVAILABILITY"): (0, lambda offer: word(offer["availability"])),
        Column("AGE"): (115, lambda offer: listed(_ages_of(offer, sources))),
        Column("WHY", wide=True): (130, lambda offer: offer["detail"].get("message", "")),
    }
    fitting = {column: value for column, (least, value) in columns.items() if least <= (width or least)}
    if not any(_ages_of(offer, sources) for offer in items):
        without = (*without, "AGE")
    return Rows.of({column: fitting[column] for column in fitting if column.title not in without}, items)


def _place(offer: dict[str, Any]) -> str:
    return " ".join(filter(None, (offer["backend"], offer["region"], offer["instance_type"])))


def _gpus(offer: dict[str, Any]) -> str:
    name = offer["gpu_name"].removeprefix("NVIDIA ").removeprefix("GeForce ")
    return f"{offer['gpu_count']} × {name} {memory_text(offer['gpu_memory_mib'])}" if offer["gpu_count"] else ""


def _kind(offer: dict[str, Any]) -> str:
    return (_("spot") if offer["spot"] else _("on-demand")) if offer["price"] else _("own")


def _ages_of(offer: dict[str, Any], sources: Iterable[dict[str, Any]]) -> list[str]:
    """The age of its price, and of each source that tells its availability; stale ones are marked."""
    texts = []
    for source in sources:
        is_of_offer = (source["backend"], source["region"]) == (offer["backend"], offer["region"])
        is_told = source.get("tells", "shape") != "shape" and source["spot"] in (None, offer["spot"])
        if is_of_offer and is_told and source["fetched_at"] and "instance" not in offer["detail"]:
            age = f"{source_text(source['source'])} {age_text(source['fetched_at'])}"
            texts.append(_("{age} (stale)", age=age) if source["state"] == "stale" else age)
    return texts


def remarks(page: dict[str, Any]) -> Iterator[str]:
    if not page["items"]:
        yield _("No matching offers.")
    if page["next"]:
        yield _("Showing {n} of {total} offers; for more: --limit", n=len(page["items"]), total=page["total"])


def ages(sources: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A line for each backend with the age of each source, in the region where it is oldest."""
    by_backend: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for source in sources:
        by_backend.setdefault(source["backend"], {}).setdefault(source["source"], []).append(source)
    for backend, kinds in by_backend.items():
        yield f"{clean(backend)}: {listed([_age(name, found) for name, found in kinds.items()])}"


def _age(name: str, found: list[dict[str, Any]]) -> str:
    known = sorted(source["fetched_at"] for source in found if source["fetched_at"])
    asked = sorted(source["asked_at"] for source in found if source.get("asked_at"))
    title = source_text(name)
    read = [_("being read for {duration}", duration=age_text(asked[0]))] if asked else []
    if not known:
        return listed([_("{source} unknown", source=title), *read])
    age = _("{source} {duration} old", source=title, duration=age_text(known[0]))
    if any(source["state"] == "stale" for source in found):
        read.append(_("stale"))
    if len(known) < len(found):
        read.append(_("unknown in {n} of {total} regions", n=len(found) - len(known), total=len(found)))
    return _("{text} ({details})", text=age, details=listed(read)) if read else age


def source_text(name: str) -> str:
    return _(SOURCES[name]) if name in SOURCES else clean(name).replace("_", " ")


def problems(sources: Iterable[dict[str, Any]]) -> list[str]:
    """Why sources could not be read, each reason once. Throttled APIs recover by themselves, and share a line."""
    lines: dict[str, None] = {}
    throttled: dict[str, dict[str, None]] = {}
    for each in sources:
        error, backend = each["error"], clean(each["backend"])
        if error and error["code"] == "throttled" and error.get("api"):
            throttled.setdefault(backend, {})[f"{clean(error['api'])} ({clean(error.get('region'))})"] = None
        elif error:
            lines[f"{backend}: {clean(error['message'])}"] = None
    for backend, apis in throttled.items():
        lines[_("{backend}: throttled, retrying later: {apis}", backend=backend, apis=listed([*apis]))] = None
    return list(lines)


def _refresh(api: config.Api, path: str) -> None:
    """Refresh all sources, and wait up to REFRESH_S for them."""
    backends = api.post(f"{path}/refresh", {})["items"]
    if not backends:
        note(_("No cloud backends to refresh; hosts are always current."))
        return
    note(_("Refreshing {backends} …", backends=listed([clean(name) for name in backends])))
    until = time.monotonic() + REFRESH_S
    while any(
        (source["requested"] or (source["state"] == "failed" and source["due_at"] is None))
        and source["source"] != WITHOUT_SOURCES
        for source in api.get(path, limit=1, backend=backends)["sources"]
    ):
        if time.monotonic() > until:
            note(_("Still refreshing; showing what is known so far."))
            return
        api.sleep(1.0)


def quotas(
    backend: Backend = "",
    every: Annotated[bool, flag("--all", "-a", help=_("Include quotas of zero."))] = False,
    as_json: Json = False,
) -> None:
    """Show the quotas of cloud accounts by region, in vCPUs."""
    api = config.connect()
    found = {name: api.get(api.path("backends", name, "quotas"))["items"] for name in _names(api, backend)}
    show_found(found, _quotas(found, every), as_json)


def _quotas(found: dict[str, Any], every: bool) -> View:
    """The quotas of each backend by its name."""
    regions = [{"backend": name, **region} for name, regions in found.items() for region in regions]
    items = [{**region, **quota} for region in regions for quota in region["items"]]
    shown = [item for item in items if every or item["limit"] or item["used"]]
    if shown:
        yield Rows.of(QUOTA_COLUMNS, shown)
    elif not items:
        yield Note(_("No quotas."))
    if hidden := len(items) - len(shown):
        yield Note(
            _n(
                "{n:,} quota of zero not shown; to show: --all",
                "{n:,} quotas of zero not shown; to show: --all",
                hidden,
            )
        )
    yield from _ages_and_problems([region[source] for region in regions for source in ("source", "use")])


def cache(
    backend: Backend = "",
    hours: Annotated[int, typer.Option(metavar="N", min=1, max=2160, help=_("Number of hours."))] = 24,
    as_json: Json = False,
) -> None:
    """Show the statistics of the offer cache: hits, misses, calls to clouds and calls saved.

    By hour for one backend; otherwise the totals of each.
    """
    api = config.connect()
    found = {name: api.get(api.path("backends", name, "cache"), hours=hours) for name in _names(api, backend)}
    show_found(found, _cache(found, found[backend]["items"] if backend else [], hours), as_json)


def _cache(found: dict[str, Any], by_hour: list[dict[str, Any]], hours: int) -> View:
    """The statistics of each backend by its name, and those of one by hour."""
    if by_hour:
        most = max(each["uncached"] for each in by_hour)
        hour = {Column("HOUR"): lambda each: clock_text(each["hour"])}
        uncached = {Column(): lambda each: bar(each["uncached"], most, USED_BAR)}
        yield Rows.of({**hour, **COUNTERS, **uncached}, by_hour)
        yield ""
    if not found:
        yield Note(_("No cloud backends."))
        return
    totals = [{"backend": name, **statistics["total"]} for name, statistics in found.items()]
    yield Rows.of({Column("BACKEND"): itemgetter("backend"), **COUNTERS}, totals)
    yield Note(
        _n(
            "Last {n:,} hour. SAVED: calls that would have been made without the cache, minus CALLS.",
            "Last {n:,} hours. SAVED: calls that would have been made without the cache, minus CALLS.",
            hours,
        )
    )


def _names(api: config.Api, wanted: str) -> list[str]:
    if wanted:
        return [wanted]
    sources = api.get(api.in_project("offers"), limit=1)["sources"]
    return list(dict.fromkeys(source["backend"] for source in sources))
