"""The runner as one file, for machines that have a Python and nothing of this project."""

from __future__ import annotations

import shutil
import tempfile
import zipapp
from pathlib import Path

SOURCE = Path(__file__).resolve().parent


def build_pyz(target: Path) -> None:
    """Write the runner to `target` as a zip that Python runs: `python dstackweb-runner.pyz < orders.json`."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "dstackweb"
        shutil.copytree(SOURCE, package / "runner", ignore=shutil.ignore_patterns("__pycache__"))
        (package / "__init__.py").touch()
        main = "import sys\nfrom dstackweb.runner.__main__ import main\nsys.exit(main())\n"
        (Path(folder) / "__main__.py").write_text(main, encoding="utf-8")
        zipapp.create_archive(folder, target, interpreter="/usr/bin/env python3", compressed=True)
