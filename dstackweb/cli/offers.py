"""`dstackweb offers`, `quotas` and `cache`: what hosts and clouds offer, account quotas, and calls to clouds."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.language import N_, _, _n
from dstackweb.cli.output import Json, Watch, clean, clean_lines, echo, note, show_json, warn
from dstackweb.cli.tables import Column, bar, rich_table, show_table, watch
from dstackweb.cli.values import age_text, clock_text, listed, word
from dstackweb.spec.units import memory_text, price_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from dstackweb.cli.client import Api

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
    "subnets": N_("subnets"),
    "partitions": N_("partitions"),
    "nodes": N_("nodes"),
    "workers": N_("workers"),
}
"""What offers are made of. Others are shown as the server names them."""
WITHOUT_SOURCES = "offers"
"""The source of a backend that is read at each request."""

COLUMNS = {
    Column("OFFER", wide=True): 0,
    Column("CPU", right=True): 100,
    Column("MEMORY", right=True): 100,
    Column("GPU"): 0,
    Column("PRICE/H", right=True): 0,
    Column("KIND"): 0,
    Column(): 90,
    Column("AVAILABILITY"): 0,
    Column("WHY", wide=True): 130,
}
"""Each with the width that a terminal needs to show it. Pipes get all."""

Backend = Annotated[str, typer.Argument(metavar="BACKEND", help="One backend; all if empty.")]
COUNTERS = {
    "hits": Column("HITS", right=True),
    "misses": Column("MISSES", right=True),
    "coalesced": Column("COALESCED", right=True),
    "calls": Column("CALLS", right=True),
    "saved": Column("SAVED", right=True),
    "failures": Column("FAILURES", right=True),
    "throttles": Column("THROTTLES", right=True),
    "stale_served": Column("STALE", right=True),
}


def offers(
    gpu: Annotated[str, typer.Option(help="As in a run file: A100:1.., A100,H100:40GB..:2, 24GB..")] = "",
    cpu: Annotated[str, typer.Option(help="As in a run file: 4..")] = "",
    memory: Annotated[str, typer.Option(help="As in a run file: 16GB..")] = "",
    region: Annotated[list[str] | None, typer.Option(help="Only this region; repeat or separate by commas.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; repeat or separate by commas.")] = None,
    spot: Annotated[bool | None, typer.Option("--spot/--on-demand", help="Only spot, or only on-demand.")] = None,
    max_price: Annotated[str, typer.Option(metavar="USD", help="Maximum price per hour.")] = "",
    sort: Annotated[
        str, typer.Option(metavar="KEY", help="price, gpu_price, gpu_memory, …; -KEY sorts descending.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=2000, help="Maximum number of offers.")] = 20,
    refresh: Annotated[bool, typer.Option("--refresh", help="Refresh offers from the clouds first.")] = False,
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
        from rich.console import Console

        _watch(api, path, query, page, Console(highlight=False))
    elif as_json:
        show_json(page)
    else:
        show(page)


def show(page: dict[str, Any]) -> None:
    """A page of offers as a table on stdout; how many there are and how fresh they are on stderr."""
    if page["items"]:
        show_table(*table(page["items"], get_terminal_size().columns if sys.stdout.isatty() else None))
    for line in remarks(page):
        note(line)
    for line in problems(page["sources"]):
        warn(line)


def table(
    items: list[dict[str, Any]], width: int | None, without: Collection[str] = ()
) -> tuple[list[Column], list[list[object]]]:
    """The columns that a terminal `width` characters wide has room for; all where it is None."""
    highest = max(offer["price"] for offer in items)
    shown = {
        index: column
        for index, (column, least) in enumerate(COLUMNS.items())
        if (width or least) >= least and column.title not in without
    }
    return [*shown.values()], [[row(offer, highest)[index] for index in shown] for offer in items]


def row(offer: dict[str, Any], highest: float = 0) -> tuple[object, ...]:
    """An offer's cells, in the order of COLUMNS; the bar is its share of the `highest` price."""
    place = " ".join(part for part in (offer["backend"], offer["region"], offer["instance_type"]) if part)
    name = offer["gpu_name"].removeprefix("NVIDIA ").removeprefix("GeForce ")
    gpus = f"{offer['gpu_count']} × {name} {memory_text(offer['gpu_memory_mib'])}" if offer["gpu_count"] else ""
    return (
        place,
        offer["cpus"],
        memory_text(offer["memory_mib"]),
        gpus,
        price_text(offer["price"]) if offer["price"] else "–",
        (_("spot") if offer["spot"] else _("on-demand")) if offer["price"] else _("own"),
        bar(offer["price"], highest, PRICE_BAR),
        word(offer["availability"]),
        offer["detail"].get("message", ""),
    )


def remarks(page: dict[str, Any]) -> Iterator[str]:
    """How many offers there are, and how fresh each backend's are."""
    if not page["items"]:
        yield _("No matching offers.")
    if page["next"]:
        yield _("Showing {n} of {total} offers; for more: --limit", n=len(page["items"]), total=page["total"])
    yield from ages(page["sources"])


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
    """What the source of a backend's offers is called."""
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


def is_refreshing(sources: Iterable[dict[str, Any]]) -> bool:
    return any(
        each["state"] != "fresh" and each["due_at"] is None for each in sources if each["source"] != WITHOUT_SOURCES
    )


def _refresh(api: Api, path: str) -> None:
    """Refresh all sources, and wait up to REFRESH_S for them."""
    backends = api.post(f"{path}/refresh", {})["items"]
    if not backends:
        note(_("No cloud backends to refresh; hosts are always current."))
        return
    note(_("Refreshing {backends} …", backends=listed([clean(name) for name in backends])))
    until = time.monotonic() + REFRESH_S
    while is_refreshing(api.get(path, limit=1, backend=backends)["sources"]):
        if time.monotonic() > until:
            note(_("Still refreshing; showing what is known so far."))
            return
        api.sleep(1.0)


def _watch(api: Api, path: str, query: dict[str, Any], page: dict[str, Any], console: Console) -> None:
    def draw(page: dict[str, Any]) -> Iterator[RenderableType]:
        from rich.text import Text

        if page["items"]:
            columns, rows = table(page["items"], console.width)
            yield rich_table(columns, [[clean(cell) for cell in cells] for cells in rows])
        yield from (Text(clean_lines(line), style="dim") for line in remarks(page))
        warning = _("warning: ")
        yield from (Text(f"{warning}{clean_lines(line)}", style="yellow") for line in problems(page["sources"]))

    watch(page, lambda: api.get(path, **query), draw, lambda _page: False, console, api.sleep, WATCH_S)


def quotas(
    backend: Backend = "",
    every: Annotated[bool, typer.Option("--all", "-a", help="Include quotas of zero.")] = False,
    as_json: Json = False,
) -> None:
    """Show the quotas of cloud accounts by region, in vCPUs."""
    api = config.connect()
    found = {name: api.get(api.path("backends", name, "quotas"))["items"] for name in _names(api, backend)}
    if as_json:
        show_json(found)
        return
    rows = [
        (name, region["region"], quota)
        for name, regions in found.items()
        for region in regions
        for quota in region["items"]
    ]
    shown = [line for line in rows if every or line[2]["limit"] or line[2]["used"]]
    if shown:
        columns = [Column("BACKEND"), Column("REGION"), Column("QUOTA", wide=True)]
        amounts = [Column("USED", right=True), Column("LIMIT", right=True), Column()]
        show_table([*columns, *amounts], [_quota(*line) for line in shown])
    elif not rows:
        note(_("No quotas."))
    if hidden := len(rows) - len(shown):
        note(
            _n(
                "{n:,} quota of zero not shown; to show: --all",
                "{n:,} quotas of zero not shown; to show: --all",
                hidden,
            )
        )
    sources = [region["source"] for regions in found.values() for region in regions]
    for line in ages(sources):
        note(line)
    for line in problems(sources):
        warn(line)


def _quota(backend: str, region: str, quota: dict[str, Any]) -> tuple[object, ...]:
    used, limit = quota["used"], quota["limit"]
    return backend, region, quota["name"], used, limit, bar(min(used, limit), limit, USED_BAR)


def cache(
    backend: Backend = "",
    hours: Annotated[int, typer.Option(min=1, max=2160, help="Number of hours.")] = 24,
    as_json: Json = False,
) -> None:
    """Show the statistics of the offer cache: hits, misses, calls to clouds and calls saved.

    By hour for one backend; otherwise the totals of each.
    """
    api = config.connect()
    found = {name: api.get(api.path("backends", name, "cache"), hours=hours) for name in _names(api, backend)}
    if as_json:
        show_json(found)
        return
    titles = list(COUNTERS.values())
    if backend and (by_hour := found[backend]["items"]):
        show_table([Column("HOUR"), *titles, Column()], list(_hours(by_hour)))
        echo()
    rows = [(name, *_counters(statistics["total"])) for name, statistics in found.items()]
    if rows:
        show_table([Column("BACKEND"), *titles], rows)
        note(
            _n(
                "Last {n:,} hour. SAVED: calls that would have been made without the cache, minus CALLS.",
                "Last {n:,} hours. SAVED: calls that would have been made without the cache, minus CALLS.",
                hours,
            )
        )
    else:
        note(_("No cloud backends."))


def _hours(by_hour: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    most = max(each["uncached"] for each in by_hour)
    for each in by_hour:
        yield clock_text(each["hour"]), *_counters(each), bar(each["uncached"], most, USED_BAR)


def _counters(figures: dict[str, Any]) -> list[object]:
    return [figures[name] for name in COUNTERS]


def _names(api: Api, wanted: str) -> list[str]:
    if wanted:
        return [wanted]
    sources = api.get(api.in_project("offers"), limit=1)["sources"]
    return list(dict.fromkeys(source["backend"] for source in sources))
