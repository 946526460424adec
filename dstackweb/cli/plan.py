"""The plan of a run: its settings with their sources, offers, backends, and its position in the queue."""

from __future__ import annotations

from typing import IO, Any

from dstackweb.cli.language import N_, _, _n
from dstackweb.cli.offers import table as offer_table
from dstackweb.cli.output import clean, echo
from dstackweb.cli.tables import Column, show_table
from dstackweb.cli.values import clock_text, run_count
from dstackweb.spec.units import price_text

OFFERS_SHOWN = 5
LINES_SHOWN = 8
ORIGINS = {
    "default": N_("default"),
    "run_file": N_("run file"),
    "command_line": N_("command line"),
    "hold": N_("hold"),
}
"""Sources of settings that have no line and no name."""


def show_plan(plan: dict[str, Any], code: str, stream: IO[str]) -> None:
    """Write a plan to `stream`: settings with their sources, offers, and the position; `code` says what is uploaded."""
    show_table([Column("SETTING"), Column("VALUE", wide=True), Column("FROM")], settings_rows(plan), stream)
    echo(file=stream)
    if plan["offers"]:
        show_table(*offer_table(plan["offers"][:OFFERS_SHOWN], None, without=("", "WHY")), stream)
        if (more := len(plan["offers"]) - OFFERS_SHOWN) > 0:
            echo(_n("and {n:,} more offer", "and {n:,} more offers", more), file=stream)
        echo(file=stream)
    if len(plan.get("backends", ())) > 1:
        show_table(
            [Column("BACKEND"), Column("START", wide=True), Column("PRICE/H", right=True)], _backends(plan), stream
        )
        echo(file=stream)
    echo(_("Code: {code}", code=code), file=stream)
    show_position(plan, stream)


def plans_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The plan of each run of the file: more than one for a pipeline."""
    return answer["plans"] if answer.get("type") == "pipeline" else [answer]


def show_plans(plans: list[dict[str, Any]], code: str, stream: IO[str]) -> None:
    """Write the plan of a run, or a row for each run of a pipeline."""
    if len(plans) == 1:
        show_plan(plans[0], code, stream)
        return
    show_outlines(plans, stream)
    echo(file=stream)
    echo(_("Code: {code}", code=code), file=stream)


def show_positions(plans: list[dict[str, Any]], stream: IO[str]) -> None:
    """Write where the run enters its queue, or a row for each run of a pipeline."""
    show_position(plans[0], stream) if len(plans) == 1 else show_outlines(plans, stream)


def show_outlines(plans: list[dict[str, Any]], stream: IO[str]) -> None:
    """Write a row for each run of a pipeline: what it asks for, and when it enters its queue."""
    columns = [Column("RUN"), Column("RESOURCES"), Column("START", wide=True)]
    show_table(columns, [_outline(plan) for plan in plans], stream)
    if sum(not plan["reason"] and not plan.get("after_detail") for plan in plans) > 1:
        echo(_("Each run is planned by itself: those that can start now may not all fit at once."), file=stream)


def _outline(plan: dict[str, Any]) -> tuple[str, str, str]:
    settings = plan["settings"]
    return settings["name"], _text(settings["resources"]), _start(plan)


def _backends(plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What each backend has for the run now, the best first."""
    return [
        (
            one["backend"],
            _backend(one),
            price_text(one["price"]) if one["price"] else "–",
        )
        for one in plan["backends"]
    ]


def _backend(one: dict[str, Any]) -> str:
    text = _("now") if one["starts"] else str(one["reason_detail"])
    return text if one["used"] else _("{text} (not used)", text=text)


def show_position(plan: dict[str, Any], stream: IO[str]) -> None:
    """Write one line to `stream`: the position, and whether the run would wait there."""
    if plan.get("runs", 1) > 1:
        text = _("Sweep of {runs}", runs=run_count(plan["runs"]))
        if at_once := plan["settings"]["array"].get("max_parallel"):
            text = _("{text}, at most {n:,} at once", text=text, n=at_once)
        echo(text, file=stream)
    echo(_start(plan), file=stream)
    if plan.get("after_detail"):
        return
    if share := plan.get("penalty_detail"):
        echo(_("Fair share: {share}", share=share), file=stream)


def _start(plan: dict[str, Any]) -> str:
    """When a run enters its queue, and whether it would wait there."""
    queue, at = clean(plan["queue"]), plan["next_at"]
    if plan.get("after_detail"):
        return clean(plan["after_detail"])
    if at:
        place = _("Enters queue {queue} at {time}", queue=queue, time=clock_text(at))
    else:
        place = _("Position {position} in queue {queue}", position=plan["position"], queue=queue)
    if plan["reason"]:
        return _("{place}; would wait: {reason}", place=place, reason=clean(plan["reason_detail"]))
    return _("{place}; can start now", place=place)


def settings_rows(plan: dict[str, Any], defaults: bool = True) -> list[tuple[str, str, str]]:
    """A row for each setting of a plan or a run that has a value; the lines of the commands have a row each.

    Without `defaults`, those that no one set are left out.
    """
    rows = []
    for key, source in plan["provenance"].items():
        value = _value(plan["settings"], key)
        if value is None or (not defaults and source["source"] == "default"):
            continue
        first, *others = _lines(value) if key == "commands" else [_text(value)]
        rows.append((key, first, _origin(source)))
        rows += [("", line, "") for line in others[: LINES_SHOWN - 1]]
        if (more := len(others) - LINES_SHOWN + 1) > 0:
            rows.append(("", _n("… and {n:,} more line", "… and {n:,} more lines", more), ""))
    return rows


def _lines(commands: list[str]) -> list[str]:
    return [line for command in commands for line in command.splitlines() if line.strip()] or [""]


def _value(settings: dict[str, Any], key: str) -> Any:
    """The value of a key such as `resources.cpu`; None if it has none."""
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
            return _("line {number}", number=line)
        case {"source": "profile", "profile": name}:
            return _("profile {name}", name=name)
        case {"source": str(name)}:
            return _(ORIGINS[name]) if name in ORIGINS else name.replace("_", " ")
    return ""
