"""The plan of a run: its settings with their sources, offers, backends, and its position in the queue."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from dstackweb.cli.language import N_, _, _n, clock_text, run_count
from dstackweb.cli.offers import table as offer_table
from dstackweb.cli.output import clean
from dstackweb.cli.tables import Column, ItemColumns, Note, Rows, View, Warn
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


def plans_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The plan of each run of the file: more than one for a pipeline."""
    return answer["plans"] if answer.get("type") == "pipeline" else [answer]


def view_of(plans: list[dict[str, Any]], code: str) -> View:
    """Settings with their sources, offers, what is uploaded, and the position; of a pipeline a row for each run."""
    if len(plans) > 1:
        yield from positions(plans)
        yield ""
        yield _("Code: {code}", code=code)
        return
    (plan,) = plans
    yield Rows([Column("SETTING"), Column("VALUE", wide=True), Column("FROM")], settings_rows(plan))
    yield ""
    if plan["offers"]:
        yield offer_table(plan["offers"][:OFFERS_SHOWN], None, without=("", "WHY"))
        if (more := len(plan["offers"]) - OFFERS_SHOWN) > 0:
            yield _n("and {n:,} more offer", "and {n:,} more offers", more)
        yield ""
    if len(plan.get("backends", ())) > 1:
        yield Rows.of(BACKENDS, plan["backends"])
        yield ""
    yield _("Code: {code}", code=code)
    yield from positions(plans)


def positions(plans: list[dict[str, Any]]) -> View:
    """Where the run enters its queue, or a row for each run of a pipeline."""
    if len(plans) > 1:
        yield Rows.of(OUTLINE, plans)
        if sum(not plan["reason"] and not plan.get("after_detail") for plan in plans) > 1:
            yield _("Each run is planned by itself: those that can start now may not all fit at once.")
        return
    (plan,) = plans
    if plan.get("runs", 1) > 1:
        text = _("Sweep of {runs}", runs=run_count(plan["runs"]))
        if at_once := plan["settings"]["array"].get("max_parallel"):
            text = _("{text}, at most {n:,} at once", text=text, n=at_once)
        yield text
    yield _start(plan)
    if not plan.get("after_detail") and (share := plan.get("penalty_detail")):
        yield _("Fair share: {share}", share=share)


def remarks(plans: list[dict[str, Any]]) -> View:
    """Notes and warnings on each run; with its name where there are several."""
    for plan in plans:
        name = f"{plan['settings'].get('name')}: " if len(plans) > 1 else ""
        yield from (Note(name + clean(one["message"])) for one in plan["notes"])
        if displaces := plan.get("displaces"):
            yield Note(name + _("{sentence}.", sentence=clean(displaces["detail"])))
        yield from (Warn(name + clean(one["message"])) for one in plan["warnings"])


def _backend(one: dict[str, Any]) -> str:
    text = _("now") if one["starts"] else str(one["reason_detail"])
    return text if one["used"] else _("{text} (not used)", text=text)


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


OUTLINE: ItemColumns = {
    Column("RUN"): lambda plan: plan["settings"]["name"],
    Column("RESOURCES"): lambda plan: _text(plan["settings"]["resources"]),
    Column("START", wide=True): _start,
}
"""Of the plans of a pipeline."""
BACKENDS: ItemColumns = {
    Column("BACKEND"): itemgetter("backend"),
    Column("START", wide=True): _backend,
    Column("PRICE/H", right=True): lambda one: price_text(one["price"]) if one["price"] else "–",
}


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
