"""The keys of run files. Profiles may have those of `ProfileFields`: where a run starts, in what, and for how long."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dstackweb.lib.language import gettext as _, gettext_noop
from dstackweb.spec.array import ArrayFields, read_array
from dstackweb.spec.codes import Ide, RunType
from dstackweb.spec.containers import MOST_VOLUMES, Entrypoint, Image, Volume
from dstackweb.spec.env import read_env
from dstackweb.spec.fields import Keys, Names, Seconds, SecondsOrOff, Text, key, optional
from dstackweb.spec.labels import MOST, MOST_VALUES, check_name, check_value
from dstackweb.spec.mappings import (
    AfterFields,
    HealthCheckFields,
    RegistryAuthFields,
    ResourcesFields,
    RetryFields,
    ScheduleFields,
    UtilizationFields,
)

SHELLS = {"sh": "/bin/sh", "bash": "/bin/bash"}
PRIORITY_MIN, PRIORITY_MAX = 0, 100
MAX_NODES = 1000
MOST_PREDECESSORS = 100
MAX_NAME = 60
_RUN_NAME = re.compile(rf"[a-z][a-z0-9-]{{0,{MAX_NAME - 1}}}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def _health_check(value: Any) -> Any:
    """A path alone, or a mapping."""
    return {"path": value} if isinstance(value, str) else value


def _auth(value: bool) -> bool:
    """Raises ValueError for a service that strangers could call."""
    if not value:
        raise ValueError(_("a service is for the project's members alone; give programs an API token"))
    return value


def _predecessors(value: Any) -> Any:
    """A name alone, one mapping, or a list of both."""
    listed = value if isinstance(value, list | tuple) else [value]
    return [{"run": one} if isinstance(one, str) else one for one in listed]


def _retry(value: Any) -> Any:
    """`true` means every event, `false` none."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


def _labels(value: Any) -> Any:
    """One value or a list of them for each name."""
    if not isinstance(value, dict):
        return value
    if not 0 < len(value) <= MOST:
        raise ValueError(_("give 1 to %(most)s labels") % {"most": MOST})
    found = {check_name(name): _label_values(accepted) for name, accepted in value.items()}
    if sum(map(len, found.values())) > MOST_VALUES:
        raise ValueError(_("the labels have more than %(most_values)s accepted values") % {"most_values": MOST_VALUES})
    return found


def _label_values(accepted: Any) -> tuple[str, ...]:
    found = accepted if isinstance(accepted, list | tuple) else [accepted]
    if not found:
        raise ValueError(_("a label needs a value, or a list of accepted values"))
    return tuple(dict.fromkeys(check_value(value) for value in found))


class ProfileFields(Keys):
    """A profile's settings. A key that is not set is None, and missing in `model_fields_set`."""

    backends: Names | None = optional(
        gettext_noop("a list of backends such as [hosts]"),
        "Backends that the run may use: the cheapest, and of equal ones the first here. Default: all that are free.",
    )
    regions: Names | None = optional(
        gettext_noop("a list of regions such as [eu-west-1]"), "Regions that the run may use."
    )
    instance_types: Names | None = optional(
        gettext_noop("a list of instance types such as [p4d.24xlarge]"), "Instance types that the run may use."
    )
    labels: Annotated[dict[str, tuple[str, ...]] | None, BeforeValidator(_labels)] = optional(
        gettext_noop("a mapping such as {disk: nvme, region: [eu, us]}"),
        "Labels that a host must have, each with one of the values. The run then uses only hosts, no clouds.",
    )
    spot_policy: Literal["spot", "on-demand", "auto"] | None = optional(
        gettext_noop("`spot`, `on-demand` or `auto`"),
        "Whether to use spot instances, which the cloud can take back at any time: always, never, or if cheaper.",
    )
    max_price: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = optional(
        gettext_noop("a number of dollars per hour such as 1.5"), "Maximum price per hour of one node."
    )
    image: Image | None = optional(
        gettext_noop("a container image such as python:3.12"),
        "The commands run in a container of this image, on hosts with Docker or Podman. Without any, its own program.",
    )
    pull_policy: Literal["always", "missing", "never"] | None = optional(
        gettext_noop("`always`, `missing` or `never`"), "Whether the host pulls the image before each start."
    )
    max_duration: SecondsOrOff = optional(
        gettext_noop("a duration such as 24h, or off"), "A job is stopped after this time."
    )
    stop_duration: Annotated[Seconds, Field(ge=0, le=86_400)] | None = optional(
        gettext_noop("a duration of at most 24h, such as 30s"),
        "Time between SIGTERM and SIGKILL when a job is stopped.",
    )
    retry: Annotated[RetryFields | None, BeforeValidator(_retry)] = optional(
        gettext_noop("true, false, or a mapping with `on_events`, `duration` and `max_attempts`"),
        "Whether a failed run is retried. It keeps its position in the queue.",
    )
    utilization_policy: UtilizationFields | None = optional(
        gettext_noop("a mapping with `min_gpu_utilization` and `time_window`"),
        "What happens to a run whose GPUs are idle.",
    )
    schedule: ScheduleFields | None = optional(
        gettext_noop("a mapping with `cron`"), "When the run enters its queue, instead of immediately."
    )
    idle_duration: SecondsOrOff = optional(
        gettext_noop("a duration such as 5m, or off"), "How long an idle cloud instance is kept for the next run."
    )


def _name(name: str) -> str:
    if not _RUN_NAME.fullmatch(name):
        raise ValueError(_("%(name)s is not valid") % {"name": repr(name[:70])})
    if _UUID.fullmatch(name):
        raise ValueError(_("it looks like the id of a run"))
    return name


def _shell(shell: str) -> str:
    path = SHELLS.get(shell, shell)
    if not path.startswith("/") or any(char.isspace() for char in path):
        raise ValueError(_("%(shell)s is not valid") % {"shell": repr(shell)})
    return path


class RunFields(ProfileFields):
    """All keys of a run file."""

    type: RunType = key(
        gettext_noop("`task`, `dev-environment` or `service`"),
        "Commands that end by themselves, a place to work in, or a server that the project's members call.",
    )
    name: Annotated[str, AfterValidator(_name)] | None = optional(
        gettext_noop("a name of up to 60 lower-case letters, digits and dashes, with a letter first"),
        "The run's name, unique among the project's active runs. Generated if empty.",
    )
    commands: Annotated[tuple[Text, ...], Field(min_length=1)] = key(
        gettext_noop("a list of shell commands, at least one"),
        "Run in order in one shell; the first one that fails ends the run. Required without `image`, except in a dev "
        "environment.",
        default=(),
    )
    init: Annotated[tuple[Text, ...], Field(min_length=1)] | None = optional(
        gettext_noop("a list of shell commands, at least one"),
        "Of a dev environment: run before anyone can work in it; the first one that fails ends the run.",
    )
    ide: Ide | None = optional(
        gettext_noop("`vscode` or `jupyter`"),
        "Of a dev environment: show a link for VS Code, or start JupyterLab, which must be installed there.",
    )
    inactivity_duration: SecondsOrOff = optional(
        gettext_noop("a duration such as 2h, or off"),
        "A dev environment or a service is stopped when it is unused for this long.",
    )
    port: Annotated[int, Field(strict=True, ge=1, le=65_535)] | None = optional(
        gettext_noop("a port number from 1 to 65535"),
        "Of a service, which needs it: the TCP port on which its commands serve HTTP, as `DSTACK_SERVICE_PORT`.",
    )
    health_check: Annotated[HealthCheckFields | None, BeforeValidator(_health_check)] = optional(
        gettext_noop("a path such as /health, or a mapping with `path`, `interval`, `timeout` and `unhealthy_after`"),
        "How a service is checked. Without it, by whether its port takes connections.",
    )
    auth: Annotated[bool, AfterValidator(_auth)] = key(
        gettext_noop("true"), "Whether a service is for the project's members alone, which it always is.", default=True
    )
    shell: Annotated[str, AfterValidator(_shell)] | None = optional(
        gettext_noop("sh, bash, or the absolute path of a shell"), "The shell that runs the commands."
    )
    working_dir: Text | None = optional(
        gettext_noop("a directory"),
        "Working directory of the commands, relative to the run's directory; absolute ones are the image's.",
    )
    env: Annotated[dict[str, str | None], BeforeValidator(read_env)] | None = optional(
        gettext_noop("a mapping such as {LR: 0.1}, or a list of NAME=value and bare NAME"),
        "Environment variables. A bare name copies the value from the shell that runs `dstackweb apply`, and masks it.",
    )
    entrypoint: Entrypoint | None = optional(
        gettext_noop("a program with its arguments"),
        "What the container runs instead of a shell, with `commands` as further arguments.",
    )
    registry_auth: RegistryAuthFields | None = optional(
        gettext_noop("a mapping with `username` and `password`"), "How to sign in to the image's registry."
    )
    volumes: Annotated[tuple[Volume, ...], Field(min_length=1, max_length=MOST_VOLUMES)] | None = optional(
        gettext_noop("a list of /host/folder:/container/folder, each with :ro or :rw at its end or not"),
        "Folders of the host in the container, of those that its admin has listed for jobs.",
    )
    nodes: Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)] | None = optional(
        gettext_noop("a whole number from 1 to 1000"), "Number of machines that run the commands together."
    )
    resources: ResourcesFields | None = optional(
        gettext_noop("a mapping with `cpu`, `memory` and `gpu`"), "Resources of each node."
    )
    priority: Annotated[int, Field(strict=True, ge=PRIORITY_MIN, le=PRIORITY_MAX)] | None = optional(
        gettext_noop("a whole number from 0 to 100"), "Higher starts first."
    )
    queue: Text | None = optional(gettext_noop("a queue's name"), "The project's queue in which the run waits.")
    after: Annotated[
        tuple[AfterFields, ...] | None,
        Field(min_length=1, max_length=MOST_PREDECESSORS),
        BeforeValidator(_predecessors),
    ] = optional(
        gettext_noop("a run's name, a mapping with `run`, `on` and `otherwise`, or a list of them"),
        "Runs and sweeps of the project that must end before this one enters its queue.",
    )
    array: Annotated[ArrayFields | None, BeforeValidator(read_array)] = optional(
        gettext_noop("a number of runs, or a mapping with `count`, `matrix` or `list`"),
        "Makes a sweep: many runs of this file, each with its index and parameters in its environment.",
    )
    preemptible: Annotated[bool, Field(strict=True)] | None = optional(
        gettext_noop("true or false"),
        "Whether the run may be displaced, and queued again: by one of higher priority where its queue has preemption, "
        "or by a queue of its cohort that takes lent GPUs back.",
    )
    profile: Text | None = optional(
        gettext_noop("a profile's name"), "Profile with defaults for keys that this file doesn't set."
    )
