"""`dstackweb keep` and `dstackweb what-if`: keeping an unused run, and trying a policy before it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.output import Column, clean, clock_text, note, show_json, show_table

if TYPE_CHECKING:
    from dstackweb.cli.client import Api


def keep(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name (the newest of it) or id.")],
    reason: Annotated[str, typer.Option("--reason", "-r", help="Why it should go on; others see it.")],
    minutes: Annotated[
        int | None, typer.Option(min=1, help="For how long; the project's usual time if not given.")
    ] = None,
) -> None:
    """Keep a run from being stopped by its utilization policy for a while."""
    body: dict[str, Any] = {"reason": reason} | ({"minutes": minutes} if minutes is not None else {})
    api = _connect()
    kept = api.json(api.send("POST", api.in_project("runs", run, "keep"), json=body))
    typer.echo(f"{clean(kept['run'])}: kept until {clock_text(kept['until'])}")
    left = kept["keeps_left"]
    note("It can't be kept once more." if not left else f"It can be kept {left} more time{'' if left == 1 else 's'}.")


def what_if(
    minimum: Annotated[int, typer.Option("--min", min=0, max=100, help="Minimum GPU utilization in percent.")],
    window: Annotated[str, typer.Option("--window", help="For how long below it: 30m, 2h.")],
    scope: Annotated[str, typer.Option(help="any: one unused GPU is enough; all: every GPU of a node.")] = "any",
    warmup: Annotated[str, typer.Option(help="Not counted after the start: 10m.")] = "0s",
    as_json: Annotated[bool, typer.Option("--json", help="As the API gives it, for scripts.")] = False,
) -> None:
    """Apply a utilization policy to the last 24 hours of real samples: which runs it would have stopped."""
    asked = {"min_gpu_utilization": minimum, "time_window": window, "scope": scope, "warmup": warmup}
    api = _connect()
    # It changes nothing, so asking again does no harm.
    told = api.json(api.send("POST", api.in_project("utilization", "what-if"), json=asked, repeatable=True))
    if as_json:
        show_json(told)
        return
    if told["stops"]:
        numbers = [Column(title, right=True) for title in ("GPUS", "GPU-HOURS", "USD")]
        columns = [Column("RUN"), Column("USER"), Column("WOULD STOP"), Column("UNUSED"), *numbers, Column("NOW")]
        show_table(columns, [_row(stop) for stop in told["stops"]])
    note(_summary(told))


def _row(stop: dict[str, Any]) -> tuple[object, ...]:
    what = "all" if stop["gpu_index"] is None else f"GPU {stop['gpu_index']}"
    return (
        stop["run"],
        stop["user"],
        clock_text(stop["at"]),
        f"{what}, node {stop['node']}",
        stop["gpus"],
        f"{stop['gpu_hours']:.1f}",
        f"{stop['usd']:.2f}" if stop["usd"] else "",
        stop["status"],
    )


def _summary(told: dict[str, Any]) -> str:
    """What it comes to, and what was looked at."""
    if not told["runs"]:
        text = "No run held GPUs in the last 24 hours, or no samples were taken."
    else:
        text = (
            f"It would have stopped {len(told['stops'])} of {told['runs']} runs, and given back "
            f"{told['saved_gpu_hours']:.1f} of {told['gpu_hours']:.1f} GPU-hours. "
            f"Looked at {told['samples']} samples of their {told['gpus']} GPUs."
        )
    if told["left_out"]:
        text += f" {told['left_out']} older runs were left out: too many samples."
    if told["holds"]:
        text += f" {told['holds']} holds are no part of it: they are never stopped."
    return text


def _connect() -> Api:
    from dstackweb.cli.client import Api

    return Api(config.load())
