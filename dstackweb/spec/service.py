"""The keys of services: their port and their health check."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from dstackweb.lib.language import gettext as _
from dstackweb.lib.language import gettext_noop
from dstackweb.spec.fields import Keys, Seconds, key

MAX_PATH = 500
INTERVAL_S, TIMEOUT_S, UNHEALTHY_AFTER = 10, 5, 3


def _path(path: str) -> str:
    if not path.startswith("/") or path.startswith("//"):
        raise ValueError(_("%(path)s does not begin with one slash") % {"path": repr(path[:70])})
    if len(path) > MAX_PATH or "#" in path or not path.isascii() or not path.isprintable() or " " in path:
        raise ValueError(_("%(path)s is not the path of a URL") % {"path": repr(path[:70])})
    return path


class HealthCheckFields(Keys):
    """How a service is checked while it runs."""

    path: Annotated[str, AfterValidator(_path)] | None = key(
        gettext_noop("a path such as /health"),
        "What is fetched with GET: a status from 200 to 399 is healthy. Without it, a port that takes connections is.",
        default=None,
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


def read_health_check(value: Any) -> Any:
    """A path alone, or a mapping."""
    return {"path": value} if isinstance(value, str) else value


def check_auth(value: bool) -> bool:
    """Raises ValueError for a service that strangers could call."""
    if not value:
        raise ValueError(_("a service is for the project's members alone; give programs an API token"))
    return value
