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
from dstackweb.spec.containers import NEEDS_IMAGE
from dstackweb.spec.env import EnvError, refers_to_secret
from dstackweb.spec.fields import Keys
from dstackweb.spec.source import Path, Source, dotted

REFUSED_TYPES = {
    "service": "use `type: task`, and start the server in its `commands`",
    "dev-environment": "use `dstackweb hold` to get GPUs for interactive work; in a file, use `type: task`",
    "fleet": "add hosts with `dstackweb host join`; admins set up cloud backends",
    "gateway": "services are not supported, so gateways are not needed",
    "volume": "use a directory that your hosts share",
}

REFUSED_KEYS = {
    "services": "a run file has one task; start other processes in its `commands`, or submit more runs",
    "ports": "ports are not forwarded; commands listen on the host's own network",
    "files": "`dstackweb apply` uploads the current directory",
    "repos": "`dstackweb apply` uploads the current directory; or clone in the `commands`",
    "python": "call the interpreter in `commands`",
    "nvcc": "install it on the hosts, or with the `commands`",
    "docker": "jobs can't start containers",
    "privileged": "jobs get no privileges on the host",
    "user": "the host's admin sets the user of jobs",
    "fleets": "use `backends`, `regions` or `instance_types`",
    "availability_zones": "use `regions`",
    "reservation": "use `instance_types`",
    "creation_policy": "free hosts are always used before cloud instances",
    "tags": "put them into the run's `name`",
    "startup_order": "all nodes start together",
    "stop_criteria": "a run ends when all its nodes have ended",
    "resources.shm_size": "jobs use the host's own /dev/shm; in containers it may fill the job's memory",
    "resources.disk": "jobs use the host's own disk",
    "resources.gpu.vendor": "only NVIDIA GPUs are supported; remove this key",
    "resources.gpu.total_memory": "use `memory` (of each GPU) and `count`",
    "resources.gpu.compute_capability": "use the names of GPUs that have it",
}
"""Keys and types of other tools that are not supported, and what to use instead. They are refused, not ignored."""

_KINDS = {"string_type": "text", "string_too_short": "text", "int_type": "a whole number"}


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
            yield at(source, here, f"`{dotted(here)}` has no value; remove the key or give it one")
        elif here != ("env",):
            yield from missing_values(source, child, here)


def without_image(source: Source) -> Iterator[FieldError]:
    """Errors for keys that need an image, and for missing commands."""
    data = source.data
    if "image" not in data:
        for name in (name for name in NEEDS_IMAGE if name in data):
            yield at(source, (name,), f"`{name}` is for containers; it needs an `image`")
        if "commands" not in data:
            yield at(
                source, ("commands",), "`commands` is missing; it should be a list of shell commands, at least one"
            )
    elif "entrypoint" in data and "shell" in data:
        yield at(source, ("shell",), "`shell` runs nothing where there is an `entrypoint`; remove one of them")


def secrets_elsewhere(source: Source, value: Any, path: Path = ()) -> Iterator[FieldError]:
    """Errors for references to secrets outside `env` and `registry_auth`, where they are not filled in."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        here = (*path, name)
        if here in (("env",), ("registry_auth",)):
            continue
        if isinstance(child, str) and refers_to_secret(child):
            msg = f"`{dotted(here)}` can't contain a secret; set a variable in `env` to it, and use the variable here"
            yield at(source, here, msg)
        yield from secrets_elsewhere(source, child, here)


def at(source: Source, path: Path, msg: str) -> FieldError:
    return {"loc": list(path), "line": source.line(path), "msg": msg}


def _field_error(item: ErrorDetails, model: type[Keys], source: Source) -> FieldError:
    path: Path = item["loc"]
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, EnvError):
        path = (*path, cause.key)
        return at(source, path, f"`{dotted(path)}`: {cause}")
    return at(source, path, _message(item, path, cause, model, source))


def _message(item: ErrorDetails, path: Path, cause: object, model: type[Keys], source: Source) -> str:
    name, value = dotted(path), source.at(path)
    if item["type"] == "extra_forbidden":
        return _unknown_key(path, model)
    if path == ("type",) and isinstance(value, str) and value in REFUSED_TYPES:
        return f"`type: {value}` is not supported: {REFUSED_TYPES[value]}"
    found = _field(model, path)
    expects = expected(found) if found else _KINDS.get(item["type"]) or item.get("ctx", {}).get("expected", "")
    if item["type"] == "missing":
        return f"`{name}` is missing; it should be {expects}"
    if cause is not None:
        return f"`{name}` should be {expects}: {cause}" if expects else f"`{name}`: {cause}"
    if isinstance(value, dict) and expects == "text":
        return f"`{name}` should be text; quote text that contains `: `"
    return f"`{name}` should be {expects}, not {_shown(value)}" if expects else f"`{name}`: {item['msg'].lower()}"


def expected(found: FieldInfo) -> str:
    """The text that completes "`key` should be …"."""
    extra = found.json_schema_extra
    return str(extra["expects"]) if isinstance(extra, dict) else ""


def _unknown_key(path: Path, model: type[Keys]) -> str:
    """The message for an unknown key, with the nearest known key, or all keys."""
    *parent, key = path
    if (hint := REFUSED_KEYS.get(dotted(path))) is not None:
        return f"`{dotted(path)}` is not supported: {hint}"
    known = list((keys_at(model, tuple(parent)) or model).model_fields)
    near = difflib.get_close_matches(str(key).lower(), known, n=1)
    hint = f"did you mean `{dotted((*parent, near[0]))}`?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key `{dotted(path)[:80]}`; {hint}"


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
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
