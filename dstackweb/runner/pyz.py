"""The runner as one file, for machines that have a Python and nothing of this project."""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import IO

MAIN = """\
import os, sys
sys.path[0] = os.path.abspath(sys.path[0])  # the runner changes directory
from dstackweb.runner.__main__ import main
main()
"""
LONG_AGO = (1980, 1, 1, 0, 0, 0)


@lru_cache(maxsize=1)
def pyz() -> tuple[bytes, str]:
    """The archive and its SHA-256 in hex, built once per process."""
    file = io.BytesIO()
    build_pyz(file)
    return file.getvalue(), hashlib.sha256(file.getvalue()).hexdigest()


def build_pyz(target: Path | IO[bytes]) -> None:
    """Write the runner as a zip archive that `python target` executes."""
    write_zip(target, package("runner") | {"__main__.py": MAIN.encode()})


def package(name: str) -> dict[str, bytes]:
    """The modules of `dstackweb.NAME` by their names in an archive, with a `dstackweb` that has nothing else."""
    top = Path(__file__).resolve().parents[1]
    sources = {f"dstackweb/{file.relative_to(top).as_posix()}": file for file in (top / name).glob("*.py")}
    return {path: file.read_bytes() for path, file in sources.items()} | {"dstackweb/__init__.py": b""}


def write_zip(target: Path | IO[bytes], contents: dict[str, bytes]) -> None:
    """Write a zip archive: of the same contents the same bytes on every machine (uncompressed, since zlibs differ)."""
    with zipfile.ZipFile(target, "w") as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name, LONG_AGO), contents[name], zipfile.ZIP_STORED)
