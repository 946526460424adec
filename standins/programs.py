"""Programs that PyPI does not have: who needs one ends with a sentence that says how Debian installs it.

python -m standins.programs "make messages" gettext
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import NamedTuple


class Programs(NamedTuple):
    """Programs that are needed together, and Debian's packages of them.

    Some are also looked for where daemons are, which may not be on a user's PATH: what starts them looks there too.
    """

    title: str
    names: tuple[str, ...]
    packages: str
    daemons: bool = False


NEEDS = {
    "chromium": Programs("Chromium", (), "chromium-headless-shell fonts-liberation fonts-wqy-microhei"),
    "docker": Programs("Docker", ("dockerd", "busybox"), "docker.io runc busybox-static"),
    "gcc": Programs("gcc", ("gcc",), "gcc libc6-dev"),
    "gettext": Programs("GNU gettext", ("xgettext", "msgmerge"), "gettext"),
    "pgbouncer": Programs("PgBouncer", ("pgbouncer",), "pgbouncer"),
    "slurm": Programs(
        "Slurm", ("slurmctld", "slurmd", "sbatch", "munged"), "slurmctld slurmd slurm-client munge", daemons=True
    ),
    "slurmdbd": Programs("Slurm's accounting", ("slurmdbd", "mariadbd"), "slurmdbd mariadb-server-core", daemons=True),
}
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser")
"""The shell without a window draws the same at two thirds of the CPU time."""


def chromium() -> str | None:
    """Find the browser that the variable CHROMIUM names, or else one that is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


def search_path() -> str:
    """Extend PATH by the folders of daemons, which a user's own may lack."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def is_installed(need: str) -> bool:
    """Look for all programs of a key of NEEDS."""
    if need == "chromium":
        return chromium() is not None
    path = search_path() if NEEDS[need].daemons else None
    return all(shutil.which(name, path=path) for name in NEEDS[need].names)


def require(who: str, *needs: str) -> None:
    """Exit with a sentence unless everything is installed."""
    if missing := [NEEDS[need] for need in needs if not is_installed(need)]:
        titles = " and ".join(programs.title for programs in missing)
        sys.exit(f"{who} needs {titles}: apt-get install {' '.join(programs.packages for programs in missing)}")


if __name__ == "__main__":
    require(*sys.argv[1:])
