"""Labels of hosts, `{"region": "eu", "disk": "nvme"}`, and those that runs require: a host has one value per name, a
run may accept several, `{"disk": ("nvme", "ssd")}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dstackweb.lib.language import gettext as _

MOST, MOST_VALUES = 50, 100
"""The most labels of a host, and of a run; and the most values that a run accepts, of all of them."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")
_LONGEST = 100


def check_name(name: object) -> str:
    """A label's name as it is stored. Raises ValueError with the reason."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            _(
                "%(name)s is not a valid label name: use up to 63 letters, digits, dashes, dots, slashes and "
                "underscores, with a letter or digit first and last"
            )
            % {"name": repr(str(name)[:80])}
        )
    return name


def check_value(value: object) -> str:
    """A label's value as it is stored; a whole number becomes text. Raises ValueError with the reason."""
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not text.strip() or text != text.strip() or len(text) > _LONGEST or not text.isprintable():
        raise ValueError(
            _("%(value)s is not a valid label value: use up to %(most)s characters of text")
            % {"value": repr(str(value)[:80]), "most": _LONGEST}
        )
    return text


def check_labels(labels: object) -> dict[str, str]:
    """A host's labels by name. Raises ValueError with the reason."""
    if not isinstance(labels, Mapping):
        raise ValueError(_('labels are an object with text values, such as {"region": "eu"}'))
    if len(labels) > MOST:
        raise ValueError(_("a host can have at most %(most)s labels") % {"most": MOST})
    for name, value in labels.items():
        if not isinstance(value, str):
            raise ValueError(_("the value of the label %(name)s is not text") % {"name": repr(name)})
    return {check_name(name): check_value(value) for name, value in labels.items()}


def read_pair(text: str) -> tuple[str, str]:
    """A label on a command line: `region=eu`. Raises ValueError with the reason."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(_("%(text)s is not a label such as region=eu") % {"text": repr(text)})
    return check_name(name.strip()), check_value(value.strip())


def match(required: Mapping[str, Sequence[str]] | None, labels: Mapping[str, Any]) -> bool:
    """Whether a host's labels have an accepted value for each required name."""
    return all(labels.get(name) in values for name, values in (required or {}).items())


def shown(required: Mapping[str, Sequence[str]] | None) -> list[str]:
    """Required labels as text: `disk=nvme`, or `disk=nvme|ssd` for two accepted values."""
    return [f"{name}={'|'.join(values)}" for name, values in sorted((required or {}).items())]
