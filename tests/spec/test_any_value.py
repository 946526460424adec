"""Any JSON at any place of a run file is read or refused; nothing else is raised."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.lib.errors import Invalid, TooLarge
from dstackweb.spec.run_file import parse_profile_settings, parse_run_file
from dstackweb.spec.source import read
from tests.odd import ODD, VALUES, Path, paths, replaced
from tests.spec.test_run_file import FULL

VALID: dict[str, Any] = read(FULL).data | {"labels": {"disk": ["nvme", "ssd"]}}
RESOURCES = {"cpu": {"min": 1, "max": 2}, "gpu": {"name": ["A100"], "memory": "40GB..", "count": {"min": 1}}}
VALID_AS_MAPPINGS = VALID | {
    "resources": RESOURCES,
    "env": ["A=1", "B"],
    "retry": True,
    "schedule": {"cron": ["0 2 * * *"]},
}
PLACES = [(form, place) for form in (VALID, VALID_AS_MAPPINGS) for place in paths(form)]


def parse(config: Any) -> None:
    """As an object, as text, as what the command line sets, and as a profile."""
    with suppress(Invalid, TooLarge):
        parse_run_file(config, {"B": "2"})
    with suppress(Invalid, TooLarge):
        parse_run_file({"type": "task", "commands": ["a"]}, {}, config)
    with suppress(Invalid, TooLarge):
        parse_run_file(json.dumps(config))
    with suppress(Invalid, TooLarge):
        parse_profile_settings(config)


@pytest.mark.nightly
@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:20])
def test_an_odd_value_at_every_place(value: Any) -> None:
    for form, place in PLACES:
        parse(replaced(form, place, value))


@given(st.sampled_from(PLACES), VALUES)
def test_any_value_at_any_place(where: tuple[dict[str, Any], Path], value: Any) -> None:
    parse(replaced(*where, value))
