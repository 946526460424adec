"""The plan of a run as a person reads it: settings with their origin, offers, the place it would take."""

from __future__ import annotations

from typing import IO, Any

import typer

from dstackweb.cli.offers import kind, price_text
from dstackweb.cli.output import Column, clean, clock_text, show_table, size_text

OFFERS_SHOWN = 5
LINES_SHOWN = 8


def show_plan(plan: dict[str, Any], code: str, stream: IO[str]) -> None:
    """Write the API's answer to `stream`; `code` says what is shipped along."""
    show_table([Column("SETTING"), Column("VALUE", wide=True), Column("FROM")], _settings(plan), stream)
    typer.echo(file=stream)
    if plan["offers"]:
        columns = [
            Column("OFFER", wide=True),
            Column("CPU", right=True),
            Column("MEMORY", right=True),
            Column("GPU"),
            Column("PRICE/H", right=True),
            Column("KIND"),
            Column("AVAILABILITY"),
        ]
        show_table(columns, [_offer(offer) for offer in plan["offers"][:OFFERS_SHOWN]], stream)
        if (more := len(plan["offers"]) - OFFERS_SHOWN) > 0:
            typer.echo(f"and {more} more", file=stream)
        typer.echo(file=stream)
    typer.echo(f"Code: {code}", file=stream)
    show_position(plan, stream)


def show_position(plan: dict[str, Any], stream: IO[str]) -> None:
    """Write the one line of a plan that matters most to `stream`: the position, and whether it would wait there."""
    starts = f"waits: {clean(plan['reason_detail'])}" if plan["reason"] else "there is room for it now"
    queue, at = f"queue {clean(plan['queue'])}", plan["next_at"]
    stands = f"Enters {queue} at {clock_text(at)}" if at else f"Position {plan['position']} of {queue}"
    typer.echo(f"{stands}; {starts}", file=stream)


def _settings(plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A row for each setting that has a value; each line of the commands gets a row."""
    rows = []
    for key, source in plan["provenance"].items():
        value = _value(plan["settings"], key)
        if value is None:
            continue
        first, *others = _lines(value) if key == "commands" else [_text(value)]
        rows.append((key, first, _origin(source)))
        rows += [("", line, "") for line in others[: LINES_SHOWN - 1]]
        if (more := len(others) - LINES_SHOWN + 1) > 0:
            rows.append(("", f"… and {more} more lines", ""))
    return rows


def _lines(commands: list[str]) -> list[str]:
    return [line for command in commands for line in command.splitlines() if line.strip()] or [""]


def _value(settings: dict[str, Any], key: str) -> Any:
    """The value behind a key such as `resources.cpu`; None where there is none to show."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(value: Any) -> str:
    """A value on one line, in YAML's short form."""
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            return ", ".join(f"{name}: {_text(item)}" for name, item in value.items())
        case list():
            return f"[{', '.join(_text(item) for item in value)}]"
    return str(value)


def _origin(source: dict[str, Any]) -> str:
    match source:
        case {"source": "run_file", "line": int(line)}:
            return f"line {line}"
        case {"source": "profile", "profile": name}:
            return f"profile {name}"
        case {"source": str(name)}:
            return name.replace("_", " ")
    return ""


def _offer(offer: dict[str, Any]) -> tuple[str, ...]:
    place = " ".join(part for part in (offer["backend"], offer["region"], offer["instance_type"]) if part)
    gpus = f"{offer['gpu_count']} × {offer['gpu_name']}" if offer["gpu_count"] else ""
    price = price_text(offer["price"]) if offer["price"] else "–"
    memory = size_text(offer["memory_mib"] << 20)
    return place, str(offer["cpus"]), memory, gpus, price, kind(offer), offer["availability"]
