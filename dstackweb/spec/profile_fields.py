"""What a profile may set, and a run file too: where a run may go, for how long, and what happens when it fails."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Any, Literal

from croniter import CroniterError, croniter
from pydantic import AfterValidator, BeforeValidator, Field

from dstackweb.spec.fields import Keys, Names, Seconds, SecondsOrOff, key
from dstackweb.spec.labels import MOST, check_name, check_value

RetryEvent = Literal["no-capacity", "interruption", "error"]
RETRY_EVENTS: tuple[RetryEvent, ...] = ("no-capacity", "interruption", "error")
MIN_TIME_WINDOW_S = 60
_RANDOM = re.compile(r"(?<![A-Z])[RH](?![A-Z])")


def check_cron(line: str) -> str:
    """A cron expression of five fields that comes round. Raises ValueError with what is wrong."""
    text = " ".join(line.split())
    if _RANDOM.search(text.upper()):
        raise ValueError(f"{line!r} has R or H, which mean another time at each reading")
    try:
        if len(text.split(" ")) != 5:
            raise ValueError(f"{line!r} has {len(text.split())} fields instead of minute, hour, day, month, weekday")
        croniter(text, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)).get_next()
    except CroniterError as error:
        raise ValueError(f"{line!r} is no cron expression such as `0 2 * * *`: {error}") from None
    return text


class RetryFields(Keys):
    """When a failed attempt is followed by another one."""

    on_events: Annotated[tuple[RetryEvent, ...], Field(min_length=1)] = key(
        "a list of `no-capacity`, `interruption` and `error`",
        "The failures after which the run is tried again: `no-capacity` (the job got no place to start), "
        "`interruption` (its host or runner was lost), `error` (a command failed).",
        default=RETRY_EVENTS,
    )
    duration: Seconds = key(
        "a duration such as 4h or 7d",
        "For how long after its first failure the run is tried again.",
        default="1h",
        validate_default=True,
        ge=1,
    )


class UtilizationFields(Keys):
    """The least use of its GPUs that a run must make."""

    min_gpu_utilization: Annotated[int, Field(strict=True, ge=0, le=100)] = key(
        "a whole number of percent from 0 to 100", "Below this a GPU counts as unused; equal to it, as used."
    )
    time_window: Annotated[Seconds, Field(ge=MIN_TIME_WINDOW_S)] = key(
        "a duration of at least 1m, such as 30m", "For how long a GPU must be below the minimum without a break."
    )
    scope: Literal["any", "all"] = key(
        "`any` or `all`", "Whether one unused GPU is enough, or all of a job's must be.", default="any"
    )
    warmup: Annotated[Seconds, Field(ge=0)] = key(
        "a duration such as 10m", "For how long after its start a job is not judged.", default=0
    )
    action: Literal["terminate", "notify"] = key(
        "`terminate` or `notify`", "Stop the run, or only tell people.", default="terminate"
    )


Cron = Annotated[str, AfterValidator(check_cron)]


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ScheduleFields(Keys):
    """When a run starts by itself."""

    cron: Annotated[tuple[Cron, ...], Field(min_length=1), BeforeValidator(_one_or_more)] = key(
        "a cron expression such as `0 2 * * *`, or a list of them",
        "When the run enters its queue: minute, hour, day, month, weekday, in UTC.",
    )


def _retry(value: Any) -> Any:
    """`true` means every event, `false` none."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


def _labels(value: Any) -> Any:
    """One value or a list of them for each name."""
    if not isinstance(value, dict):
        return value
    if not 0 < len(value) <= MOST:
        raise ValueError(f"from 1 to {MOST} labels can be asked for")
    return {check_name(name): _label_values(asked) for name, asked in value.items()}


def _label_values(asked: Any) -> tuple[str, ...]:
    found = asked if isinstance(asked, list | tuple) else [asked]
    if not found:
        raise ValueError("a label needs a value, or a list of those that will do")
    return tuple(dict.fromkeys(check_value(value) for value in found))


class ProfileFields(Keys):
    """A profile's settings. What isn't set has `None` and is missing in `model_fields_set`."""

    backends: Names | None = key(
        "a list of backends such as [hosts]",
        "The backends that may be used. Without it: all that cost nothing.",
        default=None,
    )
    regions: Names | None = key("a list of regions such as [eu-west-1]", "The regions that may be used.", default=None)
    instance_types: Names | None = key(
        "a list of instance types such as [p4d.24xlarge]", "The instance types that may be used.", default=None
    )
    labels: Annotated[dict[str, tuple[str, ...]] | None, BeforeValidator(_labels)] = key(
        "a mapping such as {disk: nvme, region: [eu, us]}",
        "The labels that a host must have: all of them, each with one of the values. The run stays on own hosts.",
        default=None,
    )
    spot_policy: Literal["spot", "on-demand", "auto"] | None = key(
        "`spot`, `on-demand` or `auto`",
        "Whether the cloud may take the machine back at any time: always, never, or whichever is cheaper.",
        default=None,
    )
    max_price: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = key(
        "a number of dollars per hour such as 1.5", "The highest price per hour of one node.", default=None
    )
    max_duration: SecondsOrOff = key(
        "a duration such as 24h, or off", "After this long a job is stopped.", default=None
    )
    stop_duration: Annotated[Seconds, Field(ge=0, le=86_400)] | None = key(
        "a duration of at most 24h, such as 30s",
        "How long a job that is told to stop may take before it is killed.",
        default=None,
    )
    retry: Annotated[RetryFields | None, BeforeValidator(_retry)] = key(
        "true, false, or a mapping with `on_events` and `duration`",
        "Whether a run that failed is tried again. It keeps its place in the queue.",
        default=None,
    )
    utilization_policy: UtilizationFields | None = key(
        "a mapping with `min_gpu_utilization` and `time_window`",
        "What happens to a run that leaves its GPUs unused.",
        default=None,
    )
    schedule: ScheduleFields | None = key(
        "a mapping with `cron`", "When the run enters its queue, instead of at once.", default=None
    )
    idle_duration: SecondsOrOff = key(
        "a duration such as 5m, or off",
        "How long a cloud machine is kept for the next run after it has become idle.",
        default=None,
    )
