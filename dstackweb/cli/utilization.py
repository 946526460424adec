"""`dstackweb metrics`, `keep` and `what-if`: GPU utilization of a run, and utilization policies."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from operator import itemgetter
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.language import N_, _, _n, clock_text, duration_text, gpu_count, listed, run_count, word
from dstackweb.cli.options import Json, RunName, flag
from dstackweb.cli.output import ENDED, clean, show_json
from dstackweb.cli.tables import (
    Column,
    ItemColumns,
    Note,
    Rows,
    View,
    bar,
    columns_that_fit,
    show_found,
    show_view,
    watch_view,
)
from dstackweb.spec.codes import UtilizationAction
from dstackweb.spec.units import format_duration, price_text

FETCH_S = 5
"""Hosts take a sample about every ten seconds."""
THEN = {
    UtilizationAction.TERMINATE.value: (N_("{state}, stops in {duration}"), N_("{state}, stops now")),
    UtilizationAction.NOTIFY.value: (N_("{state}, warns in {duration}"), N_("{state}, warns now")),
}
"""What happens at the end of the window, by the policy's action: before it, and then."""
ONLY_OBSERVED = (
    N_("{state}, would stop (observe only) in {duration}"),
    N_("{state}, would stop (observe only) now"),
)
BAR = 10
SPARKS = "▁▂▃▄▅▆▇█"
POINTS = 30
BY_IMPORTANCE = (
    N_("UTIL"), N_("GPU"), N_("NODE"), N_("SEEN"), N_("MEMORY"), N_("TEMP"), N_("POWER"), N_("LAST HOUR"), "",
    N_("NAME"),
)  # fmt: skip
"""The columns; a narrow terminal shows the first that fit."""

Snapshot = tuple[dict[str, Any], float]
"""The API's metrics of a run, and how many seconds the server's clock is ahead of this machine's."""


def metrics(
    run: RunName,
    once: Annotated[bool, flag("--once", help=_("Print once and exit."))] = False,
    as_json: Json = False,
) -> None:
    """Show the utilization of a run's GPUs, live, and the state of its utilization policy. Ctrl-C exits."""
    api = config.connect()
    found, skew_s = fetch(api, api.in_project("runs", run, "metrics"))
    if as_json:
        show_json(found)
    elif once or not sys.stdout.isatty() or found["status"] in ENDED:
        show_view(view_of((found, skew_s)))
    else:
        # By id: a newer run may take the name.
        path = api.in_project("runs", found["id"], "metrics")
        stopped = _("Stopped watching; {name} continues.", name=clean(found["run"]))
        watch_view(api, (found, skew_s), lambda: fetch(api, path), view_of, is_over, every_s=FETCH_S, stopped=stopped)


def fetch(api: config.Api, path: str) -> Snapshot:
    answer = api.send("GET", path, params={"points": POINTS})
    found = api.json(answer)
    try:
        skew_s = parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()
    except (KeyError, ValueError):
        skew_s = 0.0
    return found, skew_s if abs(skew_s) > 2 else 0.0  # the header has whole seconds


def is_over(snapshot: Snapshot) -> bool:
    return snapshot[0]["status"] in ENDED


def view_of(snapshot: Snapshot) -> View:
    run, now = snapshot[0], time.time() + snapshot[1]
    yield from summary(run, now)
    if _gpus(run):
        yield partial(table, run, now)


def summary(run: dict[str, Any], now: float) -> Iterator[str]:
    """A line for the run, and one for its policy."""
    gpus = _gpus(run)
    held = gpu_count(gpus) if gpus else _("no GPUs") if run["jobs"] else _("not started")
    yield f"{clean(run['run'])}: {listed([word(run['status']), held])}"
    if run["policy"] is not None:
        yield policy_text(run["policy"], now, len(run["jobs"]))
    elif run["status"] not in ENDED and gpus:
        yield _("No utilization policy: idle GPUs don't stop this run.")


def policy_text(policy: dict[str, Any], now: float, nodes: int = 1) -> str:
    """The state of a run's policy, counted by this clock: `GPU 1 below 50 % for 41 min, stops in 19 min`."""
    minimum = policy["min_gpu_utilization"]
    if policy["low_since"] is None:
        rule = {"minimum": minimum, "window": format_duration(policy["time_window_s"])}
        if policy["verdict"] == "unknown":
            text = _("Utilization unknown: GPU samples are missing (minimum {minimum} % over {window})", **rule)
        else:
            text = _("In use (minimum {minimum} % over {window})", **rule)
    else:
        text = _(
            "{gpus} below {minimum} % for {duration}",
            gpus=gpu_text(policy["gpu_index"], policy["node"] if nodes > 1 else None),
            minimum=minimum,
            duration=duration_text(_seconds(policy["low_since"], now)),
        )
        if policy["stops_at"] is not None:
            left_s = -_seconds(policy["stops_at"], now)
            soon, at_once = ONLY_OBSERVED if policy["observe_only"] else THEN[policy["action"]]
            text = _(soon if left_s > 0 else at_once, state=text, duration=duration_text(left_s))
    if policy["kept_until"]:
        values = {"time": clock_text(policy["kept_until"]), "reason": clean(policy["kept_because"])}
        kept = (
            _("kept until {time} by {user}: {reason}", user=clean(policy["kept_by"]), **values)
            if policy["kept_by"]
            else _("kept until {time}: {reason}", **values)
        )
        text = _("; ").join([text, kept])
    return text


def gpu_text(index: int | None, node: int | None) -> str:
    if node is None:
        return _("All GPUs") if index is None else _("GPU {index}", index=index)
    if index is None:
        return _("All GPUs of node {node}", node=node)
    return _("GPU {index} of node {node}", index=index, node=node)


def _gpus(run: dict[str, Any]) -> int:
    return sum(len(job["gpus"]) for job in run["jobs"])


def table(run: dict[str, Any], now: float, width: int | None) -> Rows:
    """A line for each GPU: its newest sample, and its utilization in the last hour (of an ended run, in its last).

    A terminal `width` characters wide shows the most important columns that fit.
    """
    lines = [_cells(job["node"], gpu, now) for job in run["jobs"] for gpu in job["gpus"]]
    cells: dict[str, list[object]] = {title: [line[title] for line in lines] for title in lines[0]}
    if len(run["jobs"]) == 1:
        del cells["NODE"]
    shown = columns_that_fit(cells, BY_IMPORTANCE, width)
    columns = [Column(title, right=title not in ("NAME", "", "LAST HOUR")) for title in shown]
    return Rows(columns, list(zip(*shown.values(), strict=True)))


def _cells(node: int, gpu: dict[str, Any], now: float) -> dict[str, object]:
    last = gpu["last"] or {}
    used, power = last.get("utilization"), last.get("power_w")
    limit = f"/{gpu['power_limit_w']}" if gpu["power_limit_w"] else ""
    return {
        "NODE": node,
        "GPU": gpu["index"] if gpu["index"] is not None else "?",
        "NAME": gpu["name"].removeprefix("NVIDIA ") or gpu["uuid"],
        "UTIL": "–" if used is None else f"{used} %",
        "": bar(used, 100, BAR).ljust(BAR),
        "MEMORY": _memory(last.get("memory_used_mib"), gpu["memory_mib"]),
        "POWER": "" if power is None else f"{power}{limit} W",
        "TEMP": "" if last.get("temperature_c") is None else f"{last['temperature_c']} °C",
        "SEEN": _("{duration} ago", duration=duration_text(_seconds(last["at"], now))) if last else _("never"),
        "LAST HOUR": spark(gpu["utilization"]),
    }


def _memory(used: int | None, of: int | None) -> str:
    if used is None:
        return ""
    return f"{used / 1024:.1f}/{of / 1024:.0f} GB" if of else f"{used / 1024:.1f} GB"


def spark(values: list[float | None]) -> str:
    """Percentages as a line of blocks, blank where there is no sample."""
    return "".join(" " if value is None else SPARKS[min(7, int(value * 8 / 100))] for value in values)


def _seconds(at: str, now: float) -> int:
    return int((datetime.fromtimestamp(now, UTC) - datetime.fromisoformat(at)).total_seconds())


def keep(
    run: RunName,
    reason: Annotated[str, typer.Option("--reason", "-r", metavar="TEXT", help=_("Why; shown to other members."))],
    minutes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help=_("For how long; the project's default if empty."))
    ] = None,
    as_json: Json = False,
) -> None:
    """Keep a run's utilization policy from stopping it for a while."""
    body: dict[str, Any] = {"reason": reason} | ({"minutes": minutes} if minutes is not None else {})
    api = config.connect()
    kept = api.post(api.in_project("runs", run, "keep"), body)
    text = _("{name}: kept until {time}", name=clean(kept["run"]), time=clock_text(kept["until"]))
    left = kept["keeps_left"]
    again = _n("You can extend this {n:,} more time.", "You can extend this {n:,} more times.", left)
    show_found(kept, [text, Note(again if left else _("This can't be extended again."))], as_json)


def what_if(
    minimum: Annotated[
        int, typer.Option("--min", metavar="N", min=0, max=100, help=_("Minimum GPU utilization in percent."))
    ],
    window: Annotated[
        str, typer.Option("--window", metavar="TEXT", help=_("How long a GPU must be below it, e.g. 30m or 2h."))
    ],
    scope: Annotated[
        str, typer.Option(metavar="TEXT", help=_("any: one idle GPU is enough. all: all GPUs of a node."))
    ] = "any",
    warmup: Annotated[
        str, typer.Option(metavar="TEXT", help=_("Time after the start that is ignored, e.g. 10m."))
    ] = "0s",
    as_json: Json = False,
) -> None:
    """Simulate a utilization policy on the last 24 hours: show which runs it would have stopped."""
    policy = {"min_gpu_utilization": minimum, "time_window": window, "scope": scope, "warmup": warmup}
    api = config.connect()
    found = api.post(api.in_project("utilization", "what-if"), policy, repeatable=True)
    stops = [Rows.of(STOP_COLUMNS, found["stops"])] if found["stops"] else []
    show_found(found, [*stops, Note(_what_if_text(found))], as_json)


STOP_COLUMNS: ItemColumns = {
    Column("RUN"): itemgetter("run"),
    Column("USER"): itemgetter("user"),
    Column("WOULD STOP"): lambda stop: clock_text(stop["at"]),
    Column("IDLE"): lambda stop: gpu_text(stop["gpu_index"], stop["node"]),
    Column("GPUS", right=True): itemgetter("gpus"),
    Column("GPU-HOURS", right=True): lambda stop: f"{stop['gpu_hours']:.1f}",
    Column("USD", right=True): lambda stop: price_text(round(stop["usd"], 2)) if stop["usd"] else "",
    Column("NOW"): lambda stop: word(stop["status"]),
}


def _what_if_text(found: dict[str, Any]) -> str:
    """The result, and how many runs, GPUs and samples it is based on."""
    if not found["runs"]:
        text = _("No GPU samples in the last 24 hours.")
    else:
        text = _(
            "This policy would have stopped {stopped} of {runs} and saved {saved:.1f} of {hours:.1f} GPU-hours "
            "({samples} of {gpus}).",
            stopped=len(found["stops"]),
            runs=run_count(found["runs"]),
            saved=found["saved_gpu_hours"],
            hours=found["gpu_hours"],
            samples=_n("{n:,} sample", "{n:,} samples", found["samples"]),
            gpus=gpu_count(found["gpus"]),
        )
    if found["left_out"]:
        left_out = _n(
            "{n:,} older run left out: too many samples.",
            "{n:,} older runs left out: too many samples.",
            found["left_out"],
        )
        text = _("{sentence} {another}", sentence=text, another=left_out)
    if found["holds"]:
        holds = _n(
            "{n:,} hold not included: holds are never stopped.",
            "{n:,} holds not included: holds are never stopped.",
            found["holds"],
        )
        text = _("{sentence} {another}", sentence=text, another=holds)
    return text
