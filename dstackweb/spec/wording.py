"""The errors of a run file as messages that say what was expected."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dstackweb.lib.errors import FieldError
from dstackweb.lib.language import gettext as _, gettext_noop
from dstackweb.spec.codes import RunType
from dstackweb.spec.containers import NEEDS_IMAGE
from dstackweb.spec.env import EnvError, refers_to_secret
from dstackweb.spec.fields import Keys
from dstackweb.spec.source import Path, Source, dotted

REFUSED_TYPES = {
    "fleet": gettext_noop("add hosts with `dstackweb host join`; admins set up cloud backends"),
    "gateway": gettext_noop("the server has one; services need nothing else"),
    "volume": gettext_noop("use a directory that your hosts share"),
}

REFUSED_KEYS = {
    "services": gettext_noop("a run file has one task; start other processes in its `commands`, or submit more runs"),
    "ports": gettext_noop(
        "a service has one `port`; forward those of a dev environment with `ssh -L`; tasks use the host's own network"
    ),
    "probes": gettext_noop("use `health_check`"),
    "replicas": gettext_noop("a service has one replica; submit it again under another name for more"),
    "scaling": gettext_noop("a service has one replica; `inactivity_duration` stops it when it is unused"),
    "model": gettext_noop("clients use the service's own URL"),
    "https": gettext_noop("the admin sets the gateway's URL, which services share"),
    "strip_prefix": gettext_noop("a service has a host name of its own, so there is no prefix"),
    "rate_limits": gettext_noop("limit requests in the service itself"),
    "files": gettext_noop("`dstackweb apply` uploads the current directory"),
    "repos": gettext_noop("`dstackweb apply` uploads the current directory; or clone in the `commands`"),
    "python": gettext_noop("call the interpreter in `commands`"),
    "nvcc": gettext_noop("install it on the hosts, or with the `commands`"),
    "docker": gettext_noop("jobs can't start containers"),
    "privileged": gettext_noop("jobs get no privileges on the host"),
    "user": gettext_noop("the host's admin sets the user of jobs"),
    "fleets": gettext_noop("use `backends`, `regions` or `instance_types`"),
    "availability_zones": gettext_noop("use `regions`"),
    "reservation": gettext_noop("use `instance_types`"),
    "creation_policy": gettext_noop("free hosts are always used before cloud instances"),
    "tags": gettext_noop("put them into the run's `name`"),
    "startup_order": gettext_noop("all nodes start together"),
    "stop_criteria": gettext_noop("a run ends when all its nodes have ended"),
    "resources.shm_size": gettext_noop("jobs use the host's own /dev/shm; in containers it may fill the job's memory"),
    "resources.disk": gettext_noop("jobs use the host's own disk"),
    "resources.gpu.vendor": gettext_noop("only NVIDIA GPUs are supported; remove this key"),
    "resources.gpu.total_memory": gettext_noop("use `memory` (of each GPU) and `count`"),
    "resources.gpu.compute_capability": gettext_noop("use the names of GPUs that have it"),
}
"""Keys and types of other tools that are not supported, and what to use instead. They are refused, not ignored."""

REFUSED_OF = {
    RunType.DEV_ENVIRONMENT: {
        "commands": gettext_noop("put what has to run first into `init`"),
        "nodes": gettext_noop("it has one node"),
        "array": gettext_noop("submit a file for each"),
        "entrypoint": gettext_noop("it has a shell of its own"),
        "schedule": gettext_noop("start it when you need it"),
        "retry": gettext_noop("start it again when it has failed"),
    },
    RunType.SERVICE: {
        "nodes": gettext_noop("it has one node"),
        "array": gettext_noop("submit a file for each"),
        "schedule": gettext_noop("start it when you need it"),
    },
}
"""Keys that a type can't have, and why."""
OF_DEV_ENVIRONMENTS, OF_SERVICES = ("init", "ide"), ("port", "health_check", "auth")
OF_BOTH = ("inactivity_duration",)
TEXT = gettext_noop("text")
_KINDS = {"string_type": TEXT, "string_too_short": TEXT, "int_type": gettext_noop("a whole number")}


def field_errors(error: ValidationError, model: type[Keys], source: Source) -> list[FieldError]:
    """pydantic's errors with our messages, and the lines of the source."""
    items = error.errors(include_url=False)
    # A list with an invalid item is also reported as too short: the error of the item is enough.
    around = {item["loc"][:end] for item in items for end in range(len(item["loc"]))}
    return [_field_error(item, model, source) for item in items if item["loc"] not in around]


def missing_values(source: Source, value: Any, path: Path = ()) -> Iterator[FieldError]:
    """Errors for keys without a value; those of `env` are checked elsewhere."""
    for name, child in value.items() if isinstance(value, dict) else ():
        here = (*path, name)
        if child is None:
            yield at(source, here, _("`%(here)s` has no value; remove the key or give it one") % {"here": dotted(here)})
        elif here != ("env",):
            yield from missing_values(source, child, here)


def of_other_types(source: Source) -> Iterator[FieldError]:
    """Errors for keys that only files of another type have, and for a service's missing port."""
    data = source.data
    kind = next((one for one in RunType if one == data.get("type")), None)
    if kind is None:
        return
    for name in data:
        if text := _refusal(kind, name):
            yield at(source, (name,), text)
    if kind == RunType.SERVICE and "port" not in data:
        yield at(source, ("port",), _("`port` is missing; it should be the port on which the service serves HTTP"))


def _refusal(kind: RunType, name: str) -> str:
    """Why a file of this type can't have a key; empty if it can, or the key is unknown."""
    if hint := REFUSED_OF.get(kind, {}).get(name):
        text = (
            _("`%(name)s` is for tasks, not for services: %(hint)s")
            if kind == RunType.SERVICE
            else _("`%(name)s` is for tasks, not for dev environments: %(hint)s")
        )
        return text % {"name": name, "hint": _(hint)}
    if name in OF_DEV_ENVIRONMENTS and kind != RunType.DEV_ENVIRONMENT:
        return _("`%(name)s` is for dev environments; it needs `type: dev-environment`") % {"name": name}
    if name in OF_SERVICES and kind != RunType.SERVICE:
        return _("`%(name)s` is for services; it needs `type: service`") % {"name": name}
    if name in OF_BOTH and kind == RunType.TASK:
        return _("`%(name)s` is for dev environments and services, not for tasks") % {"name": name}
    return ""


def without_image(source: Source) -> Iterator[FieldError]:
    """Errors for keys that need an image, and for missing commands."""
    data = source.data
    if "image" not in data:
        for name in (name for name in NEEDS_IMAGE if name in data):
            yield at(source, (name,), _("`%(name)s` is for containers; it needs an `image`") % {"name": name})
        if "commands" not in data and data.get("type") != RunType.DEV_ENVIRONMENT:
            yield at(
                source, ("commands",), _("`commands` is missing; it should be a list of shell commands, at least one")
            )
    elif "entrypoint" in data and "shell" in data:
        yield at(source, ("shell",), _("`shell` runs nothing where there is an `entrypoint`; remove one of them"))


def secrets_elsewhere(source: Source, value: Any, path: Path = ()) -> Iterator[FieldError]:
    """Errors for references to secrets outside `env` and `registry_auth`, where they are not filled in."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        here = (*path, name)
        if here in (("env",), ("registry_auth",)):
            continue
        if isinstance(child, str) and refers_to_secret(child):
            msg = _("`%(here)s` can't contain a secret; set a variable in `env` to it, and use the variable here") % {
                "here": dotted(here)
            }
            yield at(source, here, msg)
        yield from secrets_elsewhere(source, child, here)


def at(source: Source, path: Path, msg: str) -> FieldError:
    return {"loc": list(path), "line": source.line(path), "msg": msg}


def _field_error(item: ErrorDetails, model: type[Keys], source: Source) -> FieldError:
    path: Path = item["loc"]
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, EnvError):
        path = (*path, cause.key)
        return at(source, path, _("`%(path)s`: %(cause)s") % {"path": dotted(path), "cause": cause})
    return at(source, path, _message(item, path, cause, model, source))


def _message(item: ErrorDetails, path: Path, cause: object, model: type[Keys], source: Source) -> str:
    name, value = dotted(path), source.at(path)
    if item["type"] == "extra_forbidden":
        return _unknown_key(path, model)
    if path == ("type",) and isinstance(value, str) and value in REFUSED_TYPES:
        return _("`type: %(type)s` is not supported: %(hint)s") % {"type": value, "hint": _(REFUSED_TYPES[value])}
    found = _field(model, path)
    wanted = expected(found) if found else _KINDS.get(item["type"]) or item.get("ctx", {}).get("expected", "")
    values = {"name": name, "expects": _(wanted) if wanted else "", "cause": cause, "value": _shown(value)}
    if item["type"] == "missing":
        return _("`%(name)s` is missing; it should be %(expects)s") % values
    if cause is not None:
        return (_("`%(name)s` should be %(expects)s: %(cause)s") if wanted else "`%(name)s`: %(cause)s") % values
    if isinstance(value, dict) and wanted == TEXT:
        return _("`%(name)s` should be text; quote text that contains `: `") % values
    if not wanted:
        return f"`{name}`: {item['msg'].lower()}"
    return _("`%(name)s` should be %(expects)s, not %(value)s") % values


def expected(found: FieldInfo) -> str:
    """The text that completes "`key` should be …"."""
    extra = found.json_schema_extra
    return str(extra["expects"]) if isinstance(extra, dict) else ""


def _unknown_key(path: Path, model: type[Keys]) -> str:
    """The message for an unknown key, with the nearest known key, or all keys."""
    *parent, key = path
    if (hint := REFUSED_KEYS.get(dotted(path))) is not None:
        return _("`%(key)s` is not supported: %(hint)s") % {"key": dotted(path), "hint": _(hint)}
    known = list((keys_at(model, tuple(parent)) or model).model_fields)
    near = difflib.get_close_matches(str(key).lower(), known, n=1)
    text = (
        _("unknown key `%(key)s`; did you mean `%(near)s`?")
        if near
        else _("unknown key `%(key)s`; known keys: %(known)s")
    )
    values = {"key": dotted(path)[:80], "near": dotted((*parent, *near)), "known": ", ".join(known)}
    return text % values


def keys_at(model: type[Keys], path: Path) -> type[Keys] | None:
    """The model of the mapping at a path; None if it is not a mapping with known keys."""
    found: type[Keys] | None = model
    for part in (part for part in path if not isinstance(part, int)):
        info = found.model_fields.get(str(part)) if found else None
        found = _keys_in(info.annotation) if info else None
    return found


def _field(model: type[Keys], path: Path) -> FieldInfo | None:
    parent = keys_at(model, path[:-1]) if path else None
    return parent.model_fields.get(str(path[-1])) if parent else None


def _keys_in(annotation: Any) -> type[Keys] | None:
    """The model in an annotation such as `Annotated[RetryFields | None, …]`."""
    if isinstance(annotation, type) and issubclass(annotation, Keys):
        return annotation
    return next((found for part in get_args(annotation) if (found := _keys_in(part)) is not None), None)


def _shown(value: Any) -> str:
    """A value in the run file's notation, shortened for a message."""
    if isinstance(value, dict):
        return _("a mapping")
    if isinstance(value, list):
        return _("a list") if value else _("an empty list")
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
