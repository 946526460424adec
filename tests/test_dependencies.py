"""What the code imports is declared in pyproject.toml: another package's own needs may change with its next release."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from itertools import chain

import pytest

from tests.support import REPO

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
FOLDERS = ("dstackweb", "bench", "standins", "tests", "tools")


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def names(requirements: Iterable[str]) -> set[str]:
    return {normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}


BASE = names(PYPROJECT["project"]["dependencies"])
EXTRAS = {extra: names(needed) for extra, needed in PYPROJECT["project"]["optional-dependencies"].items()}
PRODUCT = BASE.union(*EXTRAS.values())
GROUPS = chain.from_iterable(PYPROJECT["dependency-groups"].values())
DEVELOPMENT = PRODUCT | names(needed for needed in GROUPS if isinstance(needed, str))
DISTRIBUTIONS = packages_distributions()


def imported(folder: str) -> dict[str, str]:
    """The modules of other packages, each with a file that imports it."""
    files_by_module: dict[str, str] = {}
    for file in (REPO / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for module in {module.partition(".")[0] for module in modules}:
                is_script_beside = file.with_name(f"{module}.py").exists()
                if module not in (*FOLDERS, *sys.stdlib_module_names) and not is_script_beside:
                    files_by_module[module] = str(file.relative_to(REPO))
    return files_by_module


@pytest.mark.parametrize(
    ("folder", "declared"),
    [
        ("dstackweb", PRODUCT),
        ("dstackweb/cli", BASE),
        ("dstackweb/runner", set()),
        ("dstackweb/tracking", EXTRAS["dask"]),
        *((folder, DEVELOPMENT) for folder in FOLDERS if folder != "dstackweb"),
    ],
)
def test_what_is_imported_is_declared(folder: str, declared: set[str]) -> None:
    undeclared = {
        module: file
        for module, file in imported(folder).items()
        if declared.isdisjoint(map(normal, DISTRIBUTIONS.get(module, [module])))
    }
    assert undeclared == {}
