"""The keys of a run file that are mappings, such as `resources` and `retry`, with the keys that each of them has."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Any, Literal

from croniter import CroniterError, croniter
from pydantic import AfterValidator, BeforeValidator, Field

from dstackweb.lib.language import gettext as _, gettext_noop
from dstackweb.spec.codes import On, Otherwise, UtilizationAction, UtilizationScope
from dstackweb.spec.containers import Password, Username
from dstackweb.spec.fields import Cores, Count, Keys, Memory, Seconds, Text, key, optional, read_text
from dstackweb.spec.units import parse_gpu, parse_names

RetryEvent = Literal["no-capacity", "interruption", "error"]
RETRY_EVENTS: tuple[RetryEvent, ...] = ("no-capacity", "interruption", "error")
MIN_TIME_WINDOW_S = 60
MAX_CRONS, MAX_CRON = 20, 200
"""Expressions of a schedule, and the characters of one."""
_RANDOM = re.compile(r"(?<![A-Z])[RH](?![A-Z])")
MAX_PATH = 500
INTERVAL_S, TIMEOUT_S, UNHEALTHY_AFTER = 10, 5, 3


class RetryFields(Keys):
    """When a failed run is retried."""

    on_events: Annotated[tuple[RetryEvent, ...], Field(min_length=1)] = key(
        gettext_noop("a list of `no-capacity`, `interruption` and `error`"),
        "The failures after which the run is retried: `no-capacity` (not all nodes started in time), "
        "`interruption` (its host or runner was lost), `error` (a command failed).",
        default=RETRY_EVENTS,
    )
    duration: Seconds = key(
        gettext_noop("a duration such as 4h or 7d"),
        "How long after its first failure the run is retried. The last retry enters the queue within this time.",
        default="1h",
        validate_default=True,
        ge=1,
    )
    max_attempts: Annotated[int, Field(strict=True, ge=1)] | None = optional(
        gettext_noop("a whole number of at least 1"),
        "How often the run is started at most, the first attempt included. No limit if empty.",
    )


class UtilizationFields(Keys):
    """The minimum GPU utilization of a run."""

    min_gpu_utilization: Annotated[int, Field(strict=True, ge=0, le=100)] = key(
        gettext_noop("a whole number of percent from 0 to 100"), "A GPU below this value counts as idle."
    )
    time_window: Annotated[Seconds, Field(ge=MIN_TIME_WINDOW_S)] = key(
        gettext_noop("a duration of at least 1m, such as 30m"), "How long a GPU must stay below the minimum."
    )
    scope: UtilizationScope = key(
        gettext_noop("`any` or `all`"),
        "Whether one idle GPU is enough, or all GPUs of a job must be idle.",
        default=UtilizationScope.ANY,
    )
    warmup: Annotated[Seconds, Field(ge=0)] = key(
        gettext_noop("a duration such as 10m"), "Time after the start of a job that is ignored.", default=0
    )
    action: UtilizationAction = key(
        gettext_noop("`terminate` or `notify`"),
        "Stop the run, or only send a warning.",
        default=UtilizationAction.TERMINATE,
    )


class AfterFields(Keys):
    """A run that must end before this one enters its queue."""

    run: Annotated[Text, Field(max_length=60)] = key(
        gettext_noop("a run's name or id"), "The newest run or sweep of this name, or one by id."
    )
    on: On = key(
        gettext_noop("`done`, `failed` or `ended`"),
        "How it must end: `done`, `failed` (in any other way, stopped runs included), or `ended` (in any way).",
        default=On.DONE,
    )
    otherwise: Otherwise = key(
        gettext_noop("`cancel` or `keep`"),
        "What happens to this run when it ends differently: it is canceled, or it is kept until someone releases it.",
        default=Otherwise.CANCEL,
    )


def check_cron(line: str) -> str:
    """A cron expression of five fields that is due at some time. Raises ValueError with the reason."""
    if len(line) > MAX_CRON:
        raise ValueError(_("a cron expression has more than %(max_cron)s characters") % {"max_cron": MAX_CRON})
    text = " ".join(line.split())
    if _RANDOM.search(text.upper()):
        raise ValueError(_("%(line)s has R or H, which stand for random times") % {"line": repr(line)})
    try:
        if len(text.split(" ")) != 5:
            raise ValueError(
                _("%(line)s has %(count)s fields instead of minute, hour, day, month, weekday")
                % {"line": repr(line), "count": len(text.split())}
            )
        croniter(text, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)).get_next()
    except CroniterError as error:
        raise ValueError(
            _("%(line)s is not a cron expression such as `0 2 * * *`: %(error)s") % {"line": repr(line), "error": error}
        ) from None
    return text


Cron = Annotated[str, AfterValidator(check_cron)]


def _one_or_more(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) > MAX_CRONS:
        raise ValueError(_("a schedule has at most %(max_crons)s expressions") % {"max_crons": MAX_CRONS})
    return [value] if isinstance(value, str) else value


class ScheduleFields(Keys):
    """When a run is started automatically."""

    cron: Annotated[tuple[Cron, ...], Field(min_length=1), BeforeValidator(_one_or_more)] = key(
        gettext_noop("a cron expression such as `0 2 * * *`, or a list of them"),
        "When the run enters its queue: minute, hour, day, month, weekday, in UTC. At most 20 expressions.",
    )


def _path(path: str) -> str:
    if not path.startswith("/") or path.startswith("//"):
        raise ValueError(_("%(path)s does not begin with one slash") % {"path": repr(path[:70])})
    if len(path) > MAX_PATH or "#" in path or not path.isascii() or not path.isprintable() or " " in path:
        raise ValueError(_("%(path)s is not the path of a URL") % {"path": repr(path[:70])})
    return path


class HealthCheckFields(Keys):
    """How a service is checked while it runs."""

    path: Annotated[str, AfterValidator(_path)] | None = optional(
        gettext_noop("a path such as /health"),
        "What is fetched with GET: a status from 200 to 399 is healthy. Without it, a port that takes connections is.",
    )
    interval: Annotated[Seconds, Field(ge=1, le=3600)] = key(
        gettext_noop("a duration of at most 1h, such as 10s"),
        "Time between two checks.",
        default=f"{INTERVAL_S}s",
        validate_default=True,
    )
    timeout: Annotated[Seconds, Field(ge=1, le=60)] = key(
        gettext_noop("a duration of at most 1m, such as 5s"),
        "Time in which a check must be answered.",
        default=f"{TIMEOUT_S}s",
        validate_default=True,
    )
    unhealthy_after: Annotated[int, Field(strict=True, ge=1, le=100)] = key(
        gettext_noop("a whole number from 1 to 100"),
        "How many checks in a row fail until the service is unhealthy. One that succeeds makes it healthy.",
        default=UNHEALTHY_AFTER,
    )


class RegistryAuthFields(Keys):
    """How to sign in to the image's registry."""

    username: Username = key(gettext_noop("a name, or ${{ secrets.NAME }}"), "Its user.")
    password: Password = key(gettext_noop("${{ secrets.NAME }}"), "Its password or token, a secret of the project.")


def _gpu_names(value: Any) -> Any:
    if isinstance(value, str):
        value = value.split(",")
    return parse_names(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value


class GpuFields(Keys):
    """The GPUs of one node."""

    name: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_gpu_names)] | None = optional(
        gettext_noop("a GPU's name such as A100, or a list of them"), "Any of these models."
    )
    memory: Memory | None = optional(gettext_noop("a size or a range such as 40GB or 24GB.."), "Memory of each GPU.")
    count: Count = key(
        gettext_noop("a number or a range such as 2 or 1..4"), "GPUs per node.", default="1", validate_default=True
    )


class ResourcesFields(Keys):
    """Resources of each node."""

    cpu: Cores | None = optional(gettext_noop("a number of cores or a range such as 4 or 2..8"), "CPU cores per node.")
    memory: Memory | None = optional(gettext_noop("a size or a range such as 8GB or 8GB.."), "Memory per node.")
    gpu: Annotated[GpuFields, read_text(parse_gpu)] | None = optional(
        gettext_noop("a GPU request such as A100:40GB:2, 24GB.., 2, or a mapping with `name`, `memory` and `count`"),
        "GPUs per node.",
    )
