"""`dstackweb metrics`: what a run's GPUs do, live, and when its utilization policy would stop it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.errors import TryLater, Unreachable
from dstackweb.cli.history import bar, wait_text
from dstackweb.cli.output import Column, clean, clock_text, note, show_json, show_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from dstackweb.cli.client import Api

FETCH_S = 5
"""Samples come every ten seconds or so."""
BAR = 10
SPARKS = "▁▂▃▄▅▆▇█"
POINTS = 30
MOST_TELLING = ("UTIL", "GPU", "NODE", "SEEN", "MEMORY", "TEMP", "POWER", "HOUR", "BAR", "NAME")
"""The columns; a narrow terminal has room for the first ones only."""
ENDED = ("done", "failed", "terminated")


def metrics(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name (the newest of it) or id.")],
    once: Annotated[bool, typer.Option("--once", help="Print it once instead of going on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As the API gives it, for scripts; once.")] = False,
) -> None:
    """Show what a run's GPUs do, live, and how the run stands with its utilization policy. Ctrl-C ends it."""
    from dstackweb.cli.client import Api

    api = Api(config.load())
    told, skew_s = fetch(api, api.in_project("runs", run, "metrics"))
    if as_json:
        show_json(told)
    elif once or not sys.stdout.isatty() or told["status"] in ENDED:
        now = time.time() + skew_s
        for line in head(told, now):
            typer.echo(line)
        if _gpus(told):
            from rich.console import Console

            show_table(*table(told, now, Console().width if sys.stdout.isatty() else None))
    else:
        from rich.console import Console

        # By id: a newer run may take the name.
        watch(api, api.in_project("runs", told["id"], "metrics"), told, skew_s, Console(highlight=False))


def fetch(api: Api, path: str) -> tuple[dict[str, Any], float]:
    """The metrics, and how many seconds the server's clock is ahead of this one."""
    answer = api.send("GET", path, params={"points": POINTS})
    told: dict[str, Any] = api.json(answer)
    try:
        skew_s = parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()
    except (KeyError, ValueError):
        skew_s = 0.0
    return told, skew_s if abs(skew_s) > 2 else 0.0  # the header has whole seconds


def watch(
    api: Api,
    path: str,
    told: dict[str, Any],
    skew_s: float,
    console: Console,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw it anew each second until the run has ended, or Ctrl-C; through any silence of the server."""
    from rich.live import Live

    trouble, age_s = "", 0
    try:
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                live.update(_drawn(told, time.time() + skew_s, trouble, console.width), refresh=True)
                if told["status"] in ENDED:
                    return
                sleep(1)
                age_s += 1
                if age_s >= FETCH_S:
                    age_s = 0
                    try:
                        (told, skew_s), trouble = fetch(api, path), ""
                    except (Unreachable, TryLater) as error:
                        trouble = f"{error.message} Trying again …"
    except KeyboardInterrupt:
        note(f"{clean(told['run'])} goes on without being watched.")


def _drawn(told: dict[str, Any], now: float, trouble: str, width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from dstackweb.cli.output import rich_table

    lines: list[RenderableType] = [Text(line) for line in head(told, now)]
    if _gpus(told):
        columns, rows = table(told, now, width)
        lines.append(rich_table(columns, [[clean(cell) for cell in row] for row in rows]))
    if trouble:
        lines.append(Text(trouble, style="yellow"))
    return Group(*lines)


def head(told: dict[str, Any], now: float) -> Iterator[str]:
    """The run in a line, and its policy in another."""
    gpus = _gpus(told)
    held = f"{gpus} GPU{'' if gpus == 1 else 's'}" if gpus else "it holds no GPU"
    held = f", {held}" if told["jobs"] else ", it holds nothing yet"
    yield f"{clean(told['run'])}: {told['status']}{held}"
    if told["policy"] is not None:
        yield policy_text(told["policy"], now, len(told["jobs"]))
    elif told["status"] not in ENDED and gpus:
        yield "No utilization policy: nothing stops it for leaving its GPUs unused."


def policy_text(policy: dict[str, Any], now: float, nodes: int = 1) -> str:
    """How a run stands with its policy: `GPU 1 below 50 % for 41m, stops in 19m`."""
    minimum, window_s = policy["min_gpu_utilization"], policy["time_window_s"]
    window = f"{window_s}s" if window_s % 60 else wait_text(window_s)
    if policy["verdict"] == "unknown" and policy["low_since"] is None:
        text = f"Minimum {minimum} % for {window}; samples are missing, so it is not judged now"
    elif policy["low_since"] is None:
        text = f"In use: minimum {minimum} % for {window}"
    else:
        what = "Every GPU" if policy["gpu_index"] is None else f"GPU {policy['gpu_index']}"
        what += f" of node {policy['node']}" if nodes > 1 else ""
        text = f"{what} below {minimum} % for {wait_text(_seconds(policy['low_since'], now))}"
        if policy["stops_at"] is not None:
            left_s = -_seconds(policy["stops_at"], now)
            then = "people are told" if policy["action"] == "notify" else "stops"
            then = "would stop (only observed)" if policy["observe_only"] else then
            text += f", {then} {'in ' + wait_text(left_s) if left_s > 0 else 'now'}"
    if policy["kept_until"]:
        by, why = clean(policy["kept_by"] or "somebody"), clean(policy["kept_because"])
        text += f"; kept until {clock_text(policy['kept_until'])} by {by}: {why}"
    return text


def _gpus(told: dict[str, Any]) -> int:
    return sum(len(job["gpus"]) for job in told["jobs"])


def table(told: dict[str, Any], now: float, width: int | None = None) -> tuple[list[Column], list[tuple[object, ...]]]:
    """A line for each GPU: what was seen of it last, and the last hour of its utilization.

    In a terminal of `width` characters, too narrow for all of it, what tells least is left out.
    """
    hour = Column("LAST HOUR" if told["status"] not in ENDED else "ITS LAST HOUR")
    columns = {"NODE": Column("NODE", right=True), "GPU": Column("GPU", right=True), "NAME": Column("NAME")}
    columns |= {"UTIL": Column("UTIL", right=True), "BAR": Column("")}
    columns |= {name: Column(name, right=True) for name in ("MEMORY", "POWER", "TEMP", "SEEN")} | {"HOUR": hour}
    lines = [{"NODE": job["node"]} | _cells(gpu, now) for job in told["jobs"] for gpu in job["gpus"]]
    shown: set[str] = set()
    for name in MOST_TELLING:
        wide = max(len(columns[name].title), *(len(str(line[name])) for line in lines)) + 2
        if (name != "NODE" or len(told["jobs"]) > 1) and (width is None or wide <= width + 2):
            shown.add(name)
            width = None if width is None else width - wide
    told_of = [name for name in columns if name in shown]
    return [columns[name] for name in told_of], [tuple(line[name] for name in told_of) for line in lines]


def _cells(gpu: dict[str, Any], now: float) -> dict[str, object]:
    last = gpu["last"] or {}
    used, power = last.get("utilization"), last.get("power_w")
    limit = f"/{gpu['power_limit_w']}" if gpu["power_limit_w"] else ""
    return {
        "GPU": gpu["index"] if gpu["index"] is not None else "?",
        "NAME": gpu["name"].removeprefix("NVIDIA ") or gpu["uuid"],
        "UTIL": "–" if used is None else f"{used} %",
        "BAR": bar(used, 100, BAR).ljust(BAR),
        "MEMORY": _memory(last.get("memory_used_mib"), gpu["memory_mib"]),
        "POWER": "" if power is None else f"{power}{limit} W",
        "TEMP": "" if last.get("temperature_c") is None else f"{last['temperature_c']} °C",
        "SEEN": f"{wait_text(max(0, _seconds(last['at'], now)))} ago" if last else "not yet",
        "HOUR": spark(gpu["utilization"]),
    }


def _memory(used: int | None, of: int | None) -> str:
    if used is None:
        return ""
    return f"{used / 1024:.1f}/{of / 1024:.0f} GB" if of else f"{used / 1024:.1f} GB"


def spark(values: list[float | None]) -> str:
    """Percents as a line of blocks; a blank where nothing is known."""
    return "".join(" " if value is None else SPARKS[min(7, int(value * 8 / 100))] for value in values)


def _seconds(at: str, now: float) -> int:
    """From an ISO time to now."""
    return int((datetime.fromtimestamp(now, UTC) - datetime.fromisoformat(at)).total_seconds())
