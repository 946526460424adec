"""The documentation has all moves of runs and all reasons to wait."""

from __future__ import annotations

import re
from pathlib import Path

from dstackweb.runs.codes import WaitReason
from dstackweb.runs.states import RUN_MOVES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_moves_in_the_docs_is_the_table_in_the_code() -> None:
    rows = [line.split("|")[1:3] for line in (DOCS / "states.md").read_text().splitlines() if line.startswith("| ")]
    documented = {old.strip(): {new.strip() for new in targets.split(",")} for old, targets in rows}
    for old, targets in RUN_MOVES.items():
        assert documented.get(old.value, set()) == {new.value for new in targets}, old


def test_the_table_of_reasons_in_the_docs_has_every_reason_most_permanent_first() -> None:
    table = (DOCS / "queue.md").read_text().partition("| reason | meaning |")[2].partition("\n\n")[0]
    documented = re.findall(r"`(\w+)`(?=[^|]*\|[^|]*\|$)", table, re.MULTILINE)
    assert documented == [reason for reason in WaitReason if reason is not WaitReason.NOT_WAITING]
