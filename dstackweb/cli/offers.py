"""`dstackweb offers`: what runs could have, at what price, and how old that is known."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.errors import TryLater, Unreachable, UsageError
from dstackweb.cli.history import bar
from dstackweb.cli.output import Column, age_text, clean, note, show_json, show_table, warn

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

PRICE_BAR = 8
REFRESH_S = 20.0
"""How long a refresh is waited for. What takes longer lands without anybody waiting."""
WATCH_S = 5.0
WITHOUT_SOURCES = "offers"
"""What stands for a source where a backend has none: it is asked whenever somebody looks."""

COLUMNS = {
    Column("OFFER", wide=True): 0,
    Column("CPU", right=True): 100,
    Column("MEMORY", right=True): 100,
    Column("GPU"): 0,
    Column("PRICE/H", right=True): 0,
    Column("KIND"): 0,
    Column(""): 90,
    Column("AVAILABILITY"): 0,
    Column("WHY", wide=True): 130,
}
"""Each with how many characters wide a terminal must be to have it. What isn't one has them all."""


def offers(
    gpu: Annotated[str, typer.Option(help="As in a run file: A100:1.., A100,H100:40GB..:2, 24GB..")] = "",
    cpu: Annotated[str, typer.Option(help="As in a run file: 4..")] = "",
    memory: Annotated[str, typer.Option(help="As in a run file: 16GB..")] = "",
    region: Annotated[list[str] | None, typer.Option(help="Only there; again, or with commas, for more.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only of it; again, or with commas, for more.")] = None,
    spot: Annotated[bool | None, typer.Option("--spot/--on-demand", help="Only the one or the other.")] = None,
    max_price: Annotated[str, typer.Option(metavar="USD", help="Per hour, at most.")] = "",
    sort: Annotated[
        str, typer.Option(metavar="KEY", help="price, gpu_price, gpu_memory, …; -KEY: largest first.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=2000, help="How many at most.")] = 20,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the clouds anew first.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew every 5 s, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As the API gives it, for scripts.")] = False,
) -> None:
    """Show what one node of a run could have: own hosts and clouds, the cheapest first."""
    if watch and (as_json or not sys.stdout.isatty()):
        raise UsageError("--watch is for terminals, and goes without --json.")
    asked = {
        "gpu": gpu, "cpu": cpu, "memory": memory, "region": region, "backend": backend,
        "spot": None if spot is None else str(spot).lower(), "max_price": max_price, "sort": sort, "limit": limit,
    }  # fmt: skip
    query = {key: value for key, value in asked.items() if value not in ("", None, [])}
    api = _connect()
    path = api.in_project("offers")
    if refresh:
        _refresh(api, path)
    if watch:
        _watch(api, path, query)
        return
    page = api.get(path, **query)
    if as_json:
        show_json(page)
    else:
        show(page)


def show(page: dict[str, Any]) -> None:
    """A page of offers as a table on stdout; on stderr how many there are, and how old what is known of them is."""
    if page["items"]:
        dearest = max(offer["price"] for offer in page["items"])
        width = get_terminal_size().columns if sys.stdout.isatty() else None
        shown = [index for index, least in enumerate(COLUMNS.values()) if width is None or width >= least]
        rows = [row(offer, dearest) for offer in page["items"]]
        show_table([list(COLUMNS)[index] for index in shown], [[cells[index] for index in shown] for cells in rows])
    else:
        note("Nothing like it is offered.")
    if page["next"]:
        note(f"{len(page['items'])} of {page['total']} offers; more with --limit.")
    for line in ages(page["sources"]):
        note(line)
    for told in troubles(page["sources"]):
        warn(told)


def row(offer: dict[str, Any], dearest: float) -> tuple[object, ...]:
    """An offer's cells. Its bar is its share of the dearest price."""
    place = " ".join(part for part in (offer["backend"], offer["region"], offer["instance_type"]) if part)
    name = offer["gpu_name"].removeprefix("NVIDIA ").removeprefix("GeForce ")
    gpus = f"{offer['gpu_count']} × {name} {_gb(offer['gpu_memory_mib'])}" if offer["gpu_count"] else ""
    return (
        place,
        offer["cpus"],
        _gb(offer["memory_mib"]),
        gpus,
        price_text(offer["price"]) if offer["price"] else "–",
        kind(offer),
        bar(offer["price"], dearest, PRICE_BAR),
        offer["availability"],
        offer["detail"].get("message", ""),
    )


def kind(offer: dict[str, Any]) -> str:
    """How it is paid for: what costs nothing is a host of the team's own."""
    if not offer["price"]:
        return "own"
    return "spot" if offer["spot"] else "on-demand"


def _gb(mib: int) -> str:
    """As machines are told apart: `24 GB`, `0.5 GB`, `1152 GB`."""
    return f"{mib / 1024:.0f} GB" if mib >= 10 * 1024 else f"{mib / 1024:.3g} GB"


def price_text(price: float) -> str:
    """USD, to the cent or as exactly as it is known, to four places: `$1.50`, `$0.0104`."""
    whole, _, places = f"{price:.4f}".partition(".")
    return f"${whole}.{places[:2]}{places[2:].rstrip('0')}"


def ages(sources: Iterable[dict[str, Any]]) -> Iterator[str]:
    """For each backend a line with the age of what is known, by source: that of the region where it is oldest."""
    by_backend: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for source in sources:
        by_backend.setdefault(source["backend"], {}).setdefault(source["source"], []).append(source)
    for backend, kinds in by_backend.items():
        yield f"{clean(backend)}: {', '.join(_age(name, found) for name, found in kinds.items())}"


def _age(name: str, found: list[dict[str, Any]]) -> str:
    known = sorted(source["fetched_at"] for source in found if source["fetched_at"])
    told = clean(name).replace("_", " ")
    if not known:
        return f"{told} unknown"
    notes = [f"{age_text(known[0])} old"]
    if any(source["state"] == "stale" for source in found):
        notes.append("stale")
    if len(known) < len(found):
        notes.append(f"unknown in {len(found) - len(known)} of {len(found)} regions")
    return f"{told} {', '.join(notes)}" if len(notes) == 1 else f"{told} {notes[0]} ({', '.join(notes[1:])})"


def troubles(sources: Iterable[dict[str, Any]]) -> list[str]:
    """Why sources could not be asked, each reason once; what throttles passes by itself, and is told in one line."""
    told: dict[str, None] = {}
    throttled: dict[str, dict[str, None]] = {}
    for each in sources:
        error, backend = each["error"], clean(each["backend"])
        if error and error["code"] == "throttled" and error.get("api"):
            throttled.setdefault(backend, {})[f"{clean(error['api'])} ({clean(error.get('region'))})"] = None
        elif error:
            told[f"{backend}: {clean(error['message'])}"] = None
    for backend, apis in throttled.items():
        told[f"{backend}: asked too often, and left alone for a while: {', '.join(apis)}"] = None
    return list(told)


def is_under_way(sources: Iterable[dict[str, Any]]) -> bool:
    """Whether something is about to be asked, or is being asked now."""
    return any(
        each["state"] != "fresh" and each["due_at"] is None for each in sources if each["source"] != WITHOUT_SOURCES
    )


def _connect() -> Api:
    from dstackweb.cli.client import Api

    return Api(config.load())


def _refresh(api: Api, path: str) -> None:
    """Have everything asked anew, and wait for what comes soon."""
    asked = api.json(api.send("POST", f"{path}/refresh", json={}))["items"]
    if not asked:
        note("No cloud is set up to be asked: own hosts are always as they are now.")
        return
    note(f"Asking anew: {', '.join(clean(name) for name in asked)} …")
    until = time.monotonic() + REFRESH_S
    while is_under_way(api.get(path, limit=1, backend=asked)["sources"]):
        if time.monotonic() > until:
            note("Some of it takes longer, and is shown as it was.")
            return
        time.sleep(1.0)


def _watch(api: Api, path: str, query: dict[str, Any]) -> None:
    try:
        while True:
            try:
                page = api.get(path, **query)
            except (Unreachable, TryLater) as error:
                note(f"{error.message} Trying again …")
            else:
                typer.echo("\x1b[H\x1b[2J", nl=False)
                show(page)
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        note("")
