"""Nothing outside a kind's folder names it (docs/design.md, rule 13): an import contract, and this for texts."""

from __future__ import annotations

import ast
import re

from dstackweb.backends.registry import KINDS
from tests.support import REPO

PACKAGE = REPO / "dstackweb"
FOREIGN = frozenset(kind for kind, found in KINDS.items() if not found.is_hosts)
"""The kinds but for the team's own hosts, which placement knows as such."""
EXAMPLES = {("api/offers.py", "aws")}
"""Kinds in examples of the API's reference."""


def texts(code: str) -> set[str]:
    """The kinds that code has as texts, to compare with or to pass on."""
    return {str(node.value) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)} & FOREIGN


def test_no_module_outside_its_folder_names_a_kind() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        found |= {(name, kind) for kind in texts(path.read_text()) if not name.startswith(f"backends/{kind}/")}
    assert found == EXAMPLES


def test_no_page_compares_with_a_kind() -> None:
    pages = [*(REPO / "templates").rglob("*.html"), *(REPO / "static/js").rglob("*.js")]
    compared = re.compile(f"""["']({"|".join(FOREIGN)})["']""")
    assert [page.name for page in pages if compared.search(page.read_text())] == []


def test_the_names_of_kinds_are_found_as_texts_alone() -> None:
    assert texts('backend.kind == "aws" or "awesome"  # slurm') == {"aws"}
