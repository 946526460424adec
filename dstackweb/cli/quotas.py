"""`dstackweb quotas` and `dstackweb cache`: what clouds allow an account, and what asking them has cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.history import bar
from dstackweb.cli.offers import ages, troubles
from dstackweb.cli.output import Column, clock_text, note, show_json, show_table, warn

if TYPE_CHECKING:
    from dstackweb.cli.client import Api

USED_BAR = 10

Backend = Annotated[str, typer.Argument(metavar="[BACKEND]", help="One backend; without it all clouds.")]
Json = Annotated[bool, typer.Option("--json", help="As the API gives it, for scripts.")]
NUMBERS = {
    "hits": "HITS",
    "misses": "MISSES",
    "coalesced": "COALESCED",
    "calls": "CALLS",
    "saved": "SAVED",
    "failures": "FAILURES",
    "throttles": "THROTTLES",
    "stale_served": "STALE",
}


def quotas(
    backend: Backend = "",
    every: Annotated[bool, typer.Option("--all", "-a", help="Those of zero, too.")] = False,
    as_json: Json = False,
) -> None:
    """Show each account's quotas by region, in vCPUs: how many are in use, of how many."""
    api = _connect()
    told = {name: api.get(_path(name, "quotas"))["items"] for name in _names(api, backend)}
    if as_json:
        show_json(told)
        return
    rows = [
        (name, region["region"], quota) for name, found in told.items() for region in found for quota in region["items"]
    ]
    shown = [line for line in rows if every or line[2]["limit"] or line[2]["used"]]
    if shown:
        columns = [Column("BACKEND"), Column("REGION"), Column("QUOTA", wide=True)]
        amounts = [Column("USED", right=True), Column("LIMIT", right=True), Column("")]
        show_table([*columns, *amounts], [_quota(*line) for line in shown])
    elif not rows:
        note("No quota is known.")
    if hidden := len(rows) - len(shown):
        note(f"{hidden} of zero; to see them: --all")
    sources = [region["source"] for found in told.values() for region in found]
    for line in ages(sources):
        note(line)
    for trouble in troubles(sources):
        warn(trouble)


def cache(
    backend: Backend = "",
    hours: Annotated[int, typer.Option(min=1, max=2160, help="How far back.")] = 24,
    as_json: Json = False,
) -> None:
    """Show what the cache of offers has done: looks answered, calls made to clouds and calls saved.

    Of one backend by the hour; without a name the sums of each.
    """
    api = _connect()
    told = {name: api.get(_path(name, "cache"), hours=hours) for name in _names(api, backend)}
    if as_json:
        show_json(told)
        return
    titles = [Column(title, right=True) for title in NUMBERS.values()]
    if backend:
        hours_told = told[backend]["items"]
        if hours_told:
            show_table([Column("HOUR"), *titles, Column("")], list(_hours(hours_told)))
            typer.echo()
    rows = [(name, *_numbers(found["total"])) for name, found in told.items()]
    if rows:
        show_table([Column("BACKEND"), *titles], rows)
    else:
        note("No cloud is set up.")
    note(f"Of the last {hours} hours. SAVED: calls that the same answers would have cost, less those that were made.")


def _quota(backend: str, region: str, quota: dict[str, Any]) -> tuple[object, ...]:
    used, limit = quota["used"], quota["limit"]
    return backend, region, quota["name"], used, limit, bar(min(used, limit), limit, USED_BAR)


def _hours(hours: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    most = max(each["uncached"] for each in hours)
    for each in hours:
        yield clock_text(each["hour"]), *_numbers(each), bar(each["uncached"], most, USED_BAR)


def _numbers(figures: dict[str, Any]) -> list[object]:
    return [figures[name] for name in NUMBERS]


def _connect() -> Api:
    from dstackweb.cli.client import Api

    return Api(config.load())


def _path(name: str, what: str) -> str:
    from dstackweb.cli.client import BASE, quoted

    return "/".join([f"{BASE}/backends", *quoted(name), what])


def _names(api: Api, wanted: str) -> list[str]:
    """The backend that is wanted, or all that are clouds."""
    if wanted:
        return [wanted]
    sources = api.get(api.in_project("offers"), limit=1)["sources"]
    return list(dict.fromkeys(source["backend"] for source in sources))
