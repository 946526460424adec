"""What a run file with an `array` must keep to, beyond the key's own rules."""

from __future__ import annotations

from django.utils.translation import gettext as _

from dstackweb.lib.errors import Invalid
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.env import EnvError
from dstackweb.spec.run_fields import MAX_NAME
from dstackweb.spec.run_file import RunFile


def check_array(spec: EffectiveSpec, run_file: RunFile) -> None:
    """Raises Invalid with the line."""
    array = spec.array
    if array is None:
        return
    line = run_file.line("array")
    if spec.schedule is not None:
        msg = _("a sweep can't have a `schedule`. Submit it from a scheduler of your own, such as cron, each time")
        raise Invalid.at("schedule", msg=msg, line=run_file.line("schedule"))
    if twice := sorted(set(array.names) & run_file.masked_env):
        msg = _("%(twice)s is a parameter of the `array`; remove the bare %(twice)s from `env`") % {"twice": twice[0]}
        raise Invalid.at("array", msg=msg, line=line)
    try:
        array.check_env(spec.env)
    except EnvError as error:
        raise Invalid.at("array", msg=str(error), line=line) from None
    if spec.name is not None and len(last := run_name(spec.name, array.size - 1)) > MAX_NAME:
        msg = _("the name of the last run, %(last)s, has more than %(max_name)s characters") % {
            "last": last,
            "max_name": MAX_NAME,
        }
        raise Invalid.at("name", msg=msg, line=run_file.line("name"))


def run_name(sweep: str, index: int) -> str:
    """The name of a run of a sweep."""
    return f"{sweep}-{index}"
