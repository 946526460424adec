"""Which tests are in which suite."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

from tests.conftest import SLOW
from tools.slow_tests import slow


def test_a_test_is_slow_by_the_mean_of_its_parameters() -> None:
    lines = ["0.500\ta.py::test_one[x[0]]", "0.100\ta.py::test_one[y]@group", "0.140\tb.py::test_two@group"]
    assert slow(lines) == ["a.py::test_one"]


def test_each_listed_test_is_there() -> None:
    for name in SLOW:
        path, _, function = name.partition("::")
        assert callable(
            attrgetter(function.replace("::", "."))(import_module(path.removesuffix(".py").replace("/", ".")))
        )
