"""`dstackweb metrics`, `keep` and `what-if`: GPU utilization of a run, and utilization policies."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.output import (
    Column,
    Json,
    RunName,
    bar,
    clean,
    clean_lines,
    clock_text,
    columns_that_fit,
    echo,
    note,
    plural,
    rich_table,
    show_json,
    show_table,
    watch,
)  # fmt: skip
from dstackweb.cli.runs import ENDED
from dstackweb.spec.codes import UtilizationAction
from dstackweb.spec.units import duration_text, format_duration, price_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from dstackweb.cli.client import Api

FETCH_S = 5
"""Hosts take a sample about every ten seconds."""
THEN = {UtilizationAction.TERMINATE.value: "stops", UtilizationAction.NOTIFY.value: "warns"}
"""What happens at the end of the window, by the policy's action."""
BAR = 10
SPARKS = "▁▂▃▄▅▆▇█"
POINTS = 30
BY_IMPORTANCE = ("UTIL", "GPU", "NODE", "SEEN", "MEMORY", "TEMP", "POWER", "LAST HOUR", "", "NAME")
"""The columns; a narrow terminal shows the first that fit."""

Snapshot = tuple[dict[str, Any], float]
"""The API's metrics of a run, and how many seconds the server's clock is ahead of this machine's."""


def metrics(
    run: RunName,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show the utilization of a run's GPUs, live, and the state of its utilization policy. Ctrl-C exits."""
    api = config.connect()
    found, skew_s = fetch(api, api.in_project("runs", run, "metrics"))
    if as_json:
        show_json(found)
    elif once or not sys.stdout.isatty() or found["status"] in ENDED:
        now = time.time() + skew_s
        for line in summary(found, now):
            echo(line)
        if _gpus(found):
            from rich.console import Console

            show_table(*table(found, now, Console().width if sys.stdout.isatty() else None))
    else:
        from rich.console import Console

        # By id: a newer run may take the name.
        show_live(api, api.in_project("runs", found["id"], "metrics"), (found, skew_s), Console(highlight=False))


def fetch(api: Api, path: str) -> Snapshot:
    answer = api.send("GET", path, params={"points": POINTS})
    found: dict[str, Any] = api.json(answer)
    try:
        skew_s = parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()
    except (KeyError, ValueError):
        skew_s = 0.0
    return found, skew_s if abs(skew_s) > 2 else 0.0  # the header has whole seconds


def show_live(api: Api, path: str, found: Snapshot, console: Console) -> None:
    """Draw the metrics each second until the run has ended, or Ctrl-C."""

    def draw(snapshot: Snapshot) -> Iterator[RenderableType]:
        from rich.text import Text

        run, now = snapshot[0], time.time() + snapshot[1]
        yield from (Text(clean_lines(line)) for line in summary(run, now))
        if _gpus(run):
            columns, rows = table(run, now, console.width)
            yield rich_table(columns, [[clean(cell) for cell in row] for row in rows])

    def is_over(snapshot: Snapshot) -> bool:
        return snapshot[0]["status"] in ENDED

    stopped = f"Stopped watching; {clean(found[0]['run'])} continues."
    watch(found, lambda: fetch(api, path), draw, is_over, console, api.sleep, FETCH_S, stopped)


def summary(run: dict[str, Any], now: float) -> Iterator[str]:
    """A line for the run, and one for its policy."""
    gpus = _gpus(run)
    held = plural(gpus, "GPU") if gpus else "no GPUs" if run["jobs"] else "not started"
    yield f"{clean(run['run'])}: {run['status']}, {held}"
    if run["policy"] is not None:
        yield policy_text(run["policy"], now, len(run["jobs"]))
    elif run["status"] not in ENDED and gpus:
        yield "No utilization policy: idle GPUs don't stop this run."


def policy_text(policy: dict[str, Any], now: float, nodes: int = 1) -> str:
    """The state of a run's policy, counted by this clock: `GPU 1 below 50 % for 41 min, stops in 19 min`."""
    minimum = policy["min_gpu_utilization"]
    if policy["low_since"] is None:
        rule = f"minimum {minimum} % over {format_duration(policy['time_window_s'])}"
        unknown = policy["verdict"] == "unknown"
        text = f"Utilization unknown: GPU samples are missing ({rule})" if unknown else f"In use ({rule})"
    else:
        gpus = "All GPUs" if policy["gpu_index"] is None else f"GPU {policy['gpu_index']}"
        gpus += f" of node {policy['node']}" if nodes > 1 else ""
        text = f"{gpus} below {minimum} % for {duration_text(_seconds(policy['low_since'], now))}"
        if policy["stops_at"] is not None:
            left_s = -_seconds(policy["stops_at"], now)
            then = THEN.get(policy["action"], policy["action"])
            then = "would stop (observe only)" if policy["observe_only"] else then
            text += f", {then} {'in ' + duration_text(left_s) if left_s > 0 else 'now'}"
    if policy["kept_until"]:
        by = f" by {clean(policy['kept_by'])}" if policy["kept_by"] else ""
        text += f"; kept until {clock_text(policy['kept_until'])}{by}: {clean(policy['kept_because'])}"
    return text


def _gpus(run: dict[str, Any]) -> int:
    return sum(len(job["gpus"]) for job in run["jobs"])


def table(run: dict[str, Any], now: float, width: int | None = None) -> tuple[list[Column], list[tuple[object, ...]]]:
    """A line for each GPU: its newest sample, and its utilization in the last hour (of an ended run, in its last).

    A terminal `width` characters wide shows the most important columns that fit.
    """
    lines = [_cells(job["node"], gpu, now) for job in run["jobs"] for gpu in job["gpus"]]
    cells: dict[str, list[object]] = {title: [line[title] for line in lines] for title in lines[0]}
    if len(run["jobs"]) == 1:
        del cells["NODE"]
    shown = columns_that_fit(cells, BY_IMPORTANCE, width)
    columns = [Column(title, right=title not in ("NAME", "", "LAST HOUR")) for title in shown]
    return columns, list(zip(*shown.values(), strict=True))


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
        "SEEN": f"{duration_text(_seconds(last['at'], now))} ago" if last else "never",
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
    """Seconds from an ISO time to `now`."""
    return int((datetime.fromtimestamp(now, UTC) - datetime.fromisoformat(at)).total_seconds())


def keep(
    run: RunName,
    reason: Annotated[str, typer.Option("--reason", "-r", help="Why; shown to other members.")],
    minutes: Annotated[int | None, typer.Option(min=1, help="For how long; the project's default if empty.")] = None,
    as_json: Json = False,
) -> None:
    """Keep a run's utilization policy from stopping it for a while."""
    body: dict[str, Any] = {"reason": reason} | ({"minutes": minutes} if minutes is not None else {})
    api = config.connect()
    kept = api.post(api.in_project("runs", run, "keep"), body)
    if as_json:
        show_json(kept)
        return
    echo(f"{clean(kept['run'])}: kept until {clock_text(kept['until'])}")
    left = kept["keeps_left"]
    note(f"You can extend this {plural(left, 'more time')}." if left else "This can't be extended again.")


def what_if(
    minimum: Annotated[int, typer.Option("--min", min=0, max=100, help="Minimum GPU utilization in percent.")],
    window: Annotated[str, typer.Option("--window", help="How long a GPU must be below it, e.g. 30m or 2h.")],
    scope: Annotated[str, typer.Option(help="any: one idle GPU is enough. all: all GPUs of a node.")] = "any",
    warmup: Annotated[str, typer.Option(help="Time after the start that is ignored, e.g. 10m.")] = "0s",
    as_json: Json = False,
) -> None:
    """Simulate a utilization policy on the last 24 hours: show which runs it would have stopped."""
    policy = {"min_gpu_utilization": minimum, "time_window": window, "scope": scope, "warmup": warmup}
    api = config.connect()
    found = api.post(api.in_project("utilization", "what-if"), policy, repeatable=True)
    if as_json:
        show_json(found)
        return
    if found["stops"]:
        numbers = [Column(title, right=True) for title in ("GPUS", "GPU-HOURS", "USD")]
        columns = [Column("RUN"), Column("USER"), Column("WOULD STOP"), Column("IDLE"), *numbers, Column("NOW")]
        show_table(columns, [_stop_row(stop) for stop in found["stops"]])
    note(_what_if_text(found))


def _stop_row(stop: dict[str, Any]) -> tuple[object, ...]:
    gpus = "all GPUs" if stop["gpu_index"] is None else f"GPU {stop['gpu_index']}"
    return (
        stop["run"],
        stop["user"],
        clock_text(stop["at"]),
        f"{gpus}, node {stop['node']}",
        stop["gpus"],
        f"{stop['gpu_hours']:.1f}",
        price_text(round(stop["usd"], 2)) if stop["usd"] else "",
        stop["status"],
    )


def _what_if_text(found: dict[str, Any]) -> str:
    """The result, and how many runs, GPUs and samples it is based on."""
    if not found["runs"]:
        text = "No GPU samples in the last 24 hours."
    else:
        text = (
            f"This policy would have stopped {len(found['stops'])} of {plural(found['runs'], 'run')} and saved "
            f"{found['saved_gpu_hours']:.1f} of {found['gpu_hours']:.1f} GPU-hours "
            f"({plural(found['samples'], 'sample')} of {plural(found['gpus'], 'GPU')})."
        )
    if found["left_out"]:
        text += f" {plural(found['left_out'], 'older run')} left out: too many samples."
    if found["holds"]:
        text += f" {plural(found['holds'], 'hold')} not included: holds are never stopped."
    return text
