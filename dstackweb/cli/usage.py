"""`dstackweb usage`: GPU time, idle time and cost by member, queue or project."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import typer

from dstackweb.cli import config
from dstackweb.cli.output import Column, Json, UsageError, bar, clean_lines, note, show_json, show_table
from dstackweb.spec.units import price_text

NUMBERS = [Column(title, right=True) for title in ("GPU-HOURS", "IDLE", "CPU-HOURS", "USD", "RUNS")]


def usage(
    days: Annotated[int, typer.Option(min=1, max=366, help="Number of days (UTC), including today.")] = 30,
    month: Annotated[str, typer.Option(metavar="YYYY-MM", help="A month instead.")] = "",
    by: Annotated[
        Literal["member", "queue", "project"] | None,
        typer.Option(help="What is added up. Default: member; with --all, project."),
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="All projects, for deployment admins.")] = False,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a row per month as CSV.")] = False,
) -> None:
    """Show GPU-hours, idle share and cost by member, queue or project."""
    if month and not re.fullmatch(r"\d{4}-\d\d", month):
        raise UsageError(f"{month} is not a month such as 2026-11.")
    api = config.connect()
    added_up_by = by or ("project" if whole else "member")
    asked = {"days": days, "month": month, "by": added_up_by}
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
        most = max(item["gpu_hours"] for item in found["items"])
        rows = [(item["name"], *_numbers(item), bar(item["gpu_hours"], most)) for item in found["items"]]
        show_table([Column(added_up_by.upper()), *NUMBERS, Column("")], [*rows, ("all", *_numbers(found["total"]), "")])
    note(_note(found))


def _numbers(used: dict[str, Any]) -> tuple[object, ...]:
    return (
        f"{used['gpu_hours']:,.1f}",
        "" if used["idle_share"] is None else f"{used['idle_share']:.0%}",
        f"{used['cpu_hours']:,.0f}",
        price_text(round(used["usd"], 2)) if used["usd"] else "",
        used["done"] + used["failed"] + used["terminated"],
    )


def _note(found: dict[str, Any]) -> str:
    span = f"{found['first']} to {found['last']} (UTC)"
    if not found["items"]:
        return f"No usage from {span}."
    total = found["total"]
    text = f"{span}. IDLE: below 5 % utilization, of the GPU time that samples cover"
    if total["gpu_hours"]:
        text += f" ({min(1, total['measured_gpu_hours'] / total['gpu_hours']):.0%})"
    return f"{text}. RUNS: ended."
