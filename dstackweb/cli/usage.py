"""`dstackweb usage`: GPU time, idle time and cost by member, queue or project."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import typer

from dstackweb.cli import config
from dstackweb.cli.language import _
from dstackweb.cli.output import Json, UsageError, clean_lines, note, one_form, show_json
from dstackweb.cli.tables import Column, bar, show_table
from dstackweb.spec.units import price_text

BY = {"member": Column("MEMBER"), "queue": Column("QUEUE"), "project": Column("PROJECT")}
NUMBERS = [
    Column("GPU-HOURS", right=True),
    Column("IDLE", right=True),
    Column("CPU-HOURS", right=True),
    Column("USD", right=True),
    Column("RUNS", right=True),
]


def usage(
    days: Annotated[
        int | None, typer.Option(min=1, max=366, help="Number of days (UTC), including today. Default: 30.")
    ] = None,
    month: Annotated[str, typer.Option(metavar="YYYY-MM", help="A month instead.")] = "",
    by: Annotated[
        Literal["member", "queue", "project"] | None,
        typer.Option(help="What is added up. Default: member; with --all, project."),
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="All projects, for deployment admins.")] = False,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a row per month as CSV.", callback=one_form)] = False,
) -> None:
    """Show GPU-hours, idle share and cost by member, queue or project."""
    if month and not re.fullmatch(r"\d{4}-\d\d", month):
        raise UsageError(_("{month} is not a month such as 2026-11.", month=month))
    if month and days is not None:
        raise UsageError(_("{one} can't be combined with {other}.", one="--days", other="--month"))
    api = config.connect()
    added_up_by = by or ("project" if whole else "member")
    asked = {"days": days or 30, "month": month, "by": added_up_by}
    if as_csv:
        path = api.path("usage", "export") if whole else api.in_project("exports", "usage")
        text = api.send("GET", path, params={**asked, "format": "csv"}).text
        typer.echo(clean_lines(text.replace("\r\n", "\n")), nl=False)
        return
    found = api.get(api.path("usage") if whole else api.in_project("usage"), **asked)
    if as_json:
        show_json(found)
        return
    if found["items"]:
        hours = "gpu_hours" if found["total"]["gpu_hours"] else "cpu_hours"
        most = max(item[hours] for item in found["items"])
        rows = [(item["name"], *_numbers(item), bar(item[hours], most)) for item in found["items"]]
        show_table([BY[added_up_by], *NUMBERS, Column()], [*rows, (_("all"), *_numbers(found["total"]), "")])
    note(_note(found))


def _numbers(used: dict[str, Any]) -> tuple[object, ...]:
    return (
        f"{used['gpu_hours']:,.1f}",
        "" if used["idle_share"] is None else f"{used['idle_share']:.0%}",
        f"{used['cpu_hours']:,.1f}",
        price_text(round(used["usd"], 2)) if used["usd"] else "",
        used["done"] + used["failed"] + used["terminated"],
    )


def _note(found: dict[str, Any]) -> str:
    span = {"first": found["first"], "last": found["last"]}
    if not found["items"]:
        return _("No usage from {first} to {last} (UTC).", **span)
    total = found["total"]
    if total["gpu_hours"]:
        return _(
            "{first} to {last} (UTC). IDLE: below 5 % utilization, of the GPU time that samples cover "
            "({share:.0%}). RUNS: ended.",
            **span,
            share=min(1, total["measured_gpu_hours"] / total["gpu_hours"]),
        )
    return _(
        "{first} to {last} (UTC). IDLE: below 5 % utilization, of the GPU time that samples cover. RUNS: ended.",
        **span,
    )
