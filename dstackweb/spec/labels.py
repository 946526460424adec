"""Labels of hosts, and which of them a run asks for: a name has one text on a host, and a run may take several.

A host's labels are `{"region": "eu", "disk": "nvme"}`; a run asks for `{"disk": ("nvme", "ssd")}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 50
"""Labels that a host may have, or a run may ask for."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")
_LONGEST = 100


def check_name(name: object) -> str:
    """A label's name as it is kept. Raises ValueError with what is wrong."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{str(name)[:80]!r} is no name of a label: letters, digits, dashes, dots, slashes and underscores, "
            "a letter or digit first and last, at most 63"
        )
    return name


def check_value(value: object) -> str:
    """A label's text as it is kept; a whole number counts as text. Raises ValueError with what is wrong."""
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not text.strip() or text != text.strip() or len(text) > _LONGEST or not text.isprintable():
        raise ValueError(f"{str(value)[:80]!r} is no value of a label: text of at most {_LONGEST} characters")
    return text


def check_labels(labels: object) -> dict[str, str]:
    """A host's labels, each a name with a text. Raises ValueError with what is wrong."""
    if not isinstance(labels, Mapping):
        raise ValueError('labels are an object of texts, such as {"region": "eu"}')
    if len(labels) > MOST:
        raise ValueError(f"a host has at most {MOST} labels")
    for name, value in labels.items():
        if not isinstance(value, str):
            raise ValueError(f"the value of the label {name!r} is no text")
    return {check_name(name): check_value(value) for name, value in labels.items()}


def read_pair(text: str) -> tuple[str, str]:
    """A label as typed in a command: `region=eu`. Raises ValueError with what is wrong."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is no label such as region=eu")
    return check_name(name.strip()), check_value(value.strip())


def match(asked: Mapping[str, Sequence[str]] | None, labels: Mapping[str, Any]) -> bool:
    """Whether a host with these labels has, for every name asked for, one of the values that will do."""
    return all(labels.get(name) in values for name, values in (asked or {}).items())


def shown(asked: Mapping[str, Sequence[str]] | None) -> list[str]:
    """What is asked for, as people write it: `disk=nvme`, or `disk=nvme|ssd` where either will do."""
    return [f"{name}={'|'.join(values)}" for name, values in sorted((asked or {}).items())]
