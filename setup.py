"""The build: puts what the server reads beside its code into the package. All else is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ASSETS = ("templates", "static", "locale", "examples")


class BuildWithAssets(build_py):
    """Adds the folders as `dstackweb/assets`, unless the install is editable: that reads the checkout's own."""

    def run(self) -> None:
        package = Path(self.build_lib, "dstackweb")
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)  # an earlier build may have left modules that are gone
        super().run()
        if not self.editable_mode:
            for name in ASSETS:
                shutil.copytree(name, package / "assets" / name)


setup(cmdclass={"build_py": BuildWithAssets})
