"""The run file's own keys: what to run, and what it needs."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from dstackweb.spec.env import read_env
from dstackweb.spec.fields import Cores, Keys, Memory, Text, key, read_text
from dstackweb.spec.gpu import parse_gpu, parse_gpu_count, parse_gpu_memory, parse_names
from dstackweb.spec.profile_fields import ProfileFields
from dstackweb.spec.units import Range

SHELLS = {"sh": "/bin/sh", "bash": "/bin/bash"}
PRIORITY_MIN, PRIORITY_MAX = 0, 100
MAX_NODES = 1000
_NAME = re.compile(r"[a-z][a-z0-9-]{0,59}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:70]!r} is not valid")
    if _UUID.fullmatch(name):
        raise ValueError("it looks like the id of a run")
    return name


def _shell(shell: str) -> str:
    path = SHELLS.get(shell, shell)
    if not path.startswith("/") or any(char.isspace() for char in path):
        raise ValueError(f"{shell!r} is not valid")
    return path


def _image(image: str) -> str:
    """An image becomes an argument of a command: it must not look like an option or contain spaces."""
    if image.startswith("-") or not image.isprintable() or any(char.isspace() for char in image):
        raise ValueError(f"{image!r} is not valid")
    return image


def _gpu_names(value: Any) -> Any:
    if isinstance(value, str):
        value = value.split(",")
    return parse_names(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value


class GpuFields(Keys):
    """The GPUs of one node."""

    name: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_gpu_names)] | None = key(
        "a GPU's name such as A100, or a list of them", "Any of these models.", default=None
    )
    memory: Annotated[InstanceOf[Range], read_text(parse_gpu_memory)] | None = key(
        "a size or a range such as 40GB or 24GB..", "Memory of each GPU.", default=None
    )
    count: Annotated[InstanceOf[Range], read_text(parse_gpu_count)] = key(
        "a number or a range such as 2 or 1..4", "GPUs per node.", default="1", validate_default=True
    )


class ResourcesFields(Keys):
    """Resources of each node."""

    cpu: Cores | None = key("a number of cores or a range such as 4 or 2..8", "CPU cores per node.", default=None)
    memory: Memory | None = key("a size or a range such as 8GB or 8GB..", "Memory per node.", default=None)
    gpu: Annotated[GpuFields, read_text(parse_gpu)] | None = key(
        "a GPU request such as A100:40GB:2, 24GB.., 2, or a mapping with `name`, `memory` and `count`",
        "GPUs per node.",
        default=None,
    )


class RunFields(ProfileFields):
    """All keys of a run file."""

    type: Literal["task"] = key("`task`", "The type of the file.")
    name: Annotated[str, AfterValidator(_name)] | None = key(
        "a name of up to 60 lower-case letters, digits and dashes, with a letter first",
        "The run's name, unique among the project's active runs. Generated if empty.",
        default=None,
    )
    commands: Annotated[tuple[Text, ...], Field(min_length=1)] = key(
        "a list of shell commands, at least one",
        "Run in order in one shell; the first one that fails ends the run.",
    )
    shell: Annotated[str, AfterValidator(_shell)] | None = key(
        "sh, bash, or the absolute path of a shell", "The shell that runs the commands.", default=None
    )
    working_dir: Text | None = key(
        "a directory", "Working directory of the commands, relative to the run's directory.", default=None
    )
    env: Annotated[dict[str, str | None], BeforeValidator(read_env)] | None = key(
        "a mapping such as {LR: 0.1}, or a list of NAME=value and bare NAME",
        "Environment variables. A bare name copies the value from the shell that runs `dstackweb apply`, and masks it.",
        default=None,
    )
    image: Annotated[Text, AfterValidator(_image)] | None = key(
        "a container image such as python:3.12",
        "Run the commands in a container, on hosts with Docker or Podman.",
        default=None,
    )
    nodes: Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)] | None = key(
        f"a whole number from 1 to {MAX_NODES}",
        "Number of machines that run the commands together.",
        default=None,
    )
    resources: ResourcesFields | None = key(
        "a mapping with `cpu`, `memory` and `gpu`", "Resources of each node.", default=None
    )
    priority: Annotated[int, Field(strict=True, ge=PRIORITY_MIN, le=PRIORITY_MAX)] | None = key(
        f"a whole number from {PRIORITY_MIN} to {PRIORITY_MAX}", "Higher starts first.", default=None
    )
    queue: Text | None = key("a queue's name", "The project's queue in which the run waits.", default=None)
    preemptible: Annotated[bool, Field(strict=True)] | None = key(
        "true or false", "Whether the run may be stopped and requeued for a run with higher priority.", default=None
    )
    profile: Text | None = key(
        "a profile's name", "Profile with defaults for keys that this file doesn't set.", default=None
    )
