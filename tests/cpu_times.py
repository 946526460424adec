"""A plugin of pytest that appends to $DSTACKWEB_TEST_CPU what each test took: CPU seconds, a tab, and its name.

Those of the processes that it waited for are included; fixtures count for the test that needs them first.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    began = sum(os.times()[:4])
    answer = yield
    with open(os.environ["DSTACKWEB_TEST_CPU"], "a") as file:
        file.write(f"{sum(os.times()[:4]) - began:.3f}\t{item.nodeid}\n")
    return answer
