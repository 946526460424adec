"""Stand-ins for the drivers of backend kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dstackweb.backends import registry
from dstackweb.backends.kinds import Kind


def kind_with(name: str, driver_class: type[Any], **attributes: Any) -> Kind:
    """The installed kind of that name with another driver; where there is none, a new kind that costs nothing."""
    kind = copy.copy(registry.KINDS.get(name)) or type("StubKind", (Kind,), {"name": name, "costs_money": False})()
    kind.driver_class = driver_class
    for attribute, value in attributes.items():
        setattr(kind, attribute, value)
    return kind


def use_driver(patch: pytest.MonkeyPatch, name: str, driver_class: type[Any], **attributes: Any) -> Kind:
    """Install `kind_with` for one test."""
    kind = kind_with(name, driver_class, **attributes)
    patch.setitem(registry.KINDS, name, kind)
    return kind
