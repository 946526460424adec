"""docs/states.md says what the tables in `states` say."""

from __future__ import annotations

from pathlib import Path

from dstackweb.runs.states import RUN_MOVES

DOC = Path(__file__).parents[2] / "docs" / "states.md"


def test_the_table_of_moves_in_the_docs_is_the_table_in_the_code() -> None:
    rows = [line.split("|")[1:3] for line in DOC.read_text().splitlines() if line.startswith("| ")]
    documented = {old.strip(): {new.strip() for new in targets.split(",")} for old, targets in rows}
    for old, targets in RUN_MOVES.items():
        assert documented.get(old.value, set()) == {new.value for new in targets}, old
