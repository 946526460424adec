"""The `schedule` of a run file: when it starts by itself."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Any

from croniter import CroniterError, croniter
from pydantic import AfterValidator, BeforeValidator, Field

from dstackweb.lib.language import gettext as _
from dstackweb.lib.language import gettext_noop
from dstackweb.spec.fields import Keys, key

MAX_CRONS, MAX_CRON = 20, 200
"""Expressions of a schedule, and the characters of one."""
_RANDOM = re.compile(r"(?<![A-Z])[RH](?![A-Z])")


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
