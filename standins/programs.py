"""Programs that PyPI does not have, by the Debian packages that have them, and root's rights.

python -m standins.programs                           # the packages that this machine lacks, for .ci/run
python -m standins.programs "make messages" gettext   # a sentence and exit code 1 without GNU gettext
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import NamedTuple


class Programs(NamedTuple):
    """Files and programs on PATH that are needed together, and Debian's packages of them.

    What starts `daemons` also looks for them in the folders that a user's PATH may lack.
    """

    title: str
    names: tuple[str, ...]
    packages: str
    daemons: bool = False


NEEDS = {
    "bubblewrap": Programs("bubblewrap", ("bwrap",), "bubblewrap"),
    "chromium": Programs("Chromium", (), "chromium-headless-shell"),
    "docker": Programs("Docker", ("dockerd", "docker", "runc", "/bin/busybox"), "docker.io runc busybox-static"),
    "fonts": Programs(
        "fonts for Latin and Chinese",
        ("/usr/share/fonts/truetype/liberation", "/usr/share/fonts/truetype/wqy"),
        "fonts-liberation fonts-wqy-microhei",
    ),
    "gcc": Programs("gcc", ("gcc", "/usr/include/stdlib.h"), "gcc libc6-dev"),
    "gettext": Programs("GNU gettext", ("xgettext", "msgmerge"), "gettext"),
    "iproute2": Programs("iproute2", ("ip",), "iproute2"),
    "mmdebstrap": Programs("mmdebstrap", ("mmdebstrap",), "mmdebstrap"),
    "nftables": Programs("nftables", ("nft",), "nftables"),
    "pgbouncer": Programs("PgBouncer", ("pgbouncer",), "pgbouncer"),
    "podman": Programs("Podman", ("podman", "catatonit", "/bin/busybox"), "podman catatonit busybox-static"),
    "prometheus": Programs("Prometheus", ("promtool",), "prometheus"),
    "registry": Programs("a registry of images", ("docker-registry",), "docker-registry"),
    "root": Programs("root", (), ""),
    "slurm": Programs(
        "Slurm", ("slurmctld", "slurmd", "sbatch", "munged"), "slurmctld slurmd slurm-client munge", daemons=True
    ),
    "slurmdbd": Programs("Slurm's accounting", ("slurmdbd", "mariadbd"), "slurmdbd mariadb-server-core", daemons=True),
    "ssh": Programs("OpenSSH", ("ssh", "/usr/lib/openssh/sftp-server"), "openssh-client openssh-sftp-server"),
    "systemd": Programs("systemd", ("systemd-analyze",), "systemd"),
}
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser")
"""The shell without a window draws the same at two thirds of the CPU time."""


class Missing(Exception):
    """This machine lacks keys of NEEDS. A test that gets this is skipped; a tool ends with it as its sentence."""

    def __init__(self, needs: list[str]) -> None:
        titles = " and ".join(NEEDS[need].title for need in needs)
        packages = " ".join(dict.fromkeys(" ".join(NEEDS[need].packages for need in needs).split()))
        super().__init__(f"needs {titles}: apt-get install {packages}" if packages else f"needs {titles}")


def chromium() -> str | None:
    """Find the browser that the variable CHROMIUM names, or else one that is installed."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


def search_path() -> str:
    """Extend PATH by the folders of daemons, which a user's own may lack."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def is_installed(need: str) -> bool:
    """Look for all that a key of NEEDS names."""
    if need == "root":
        return os.geteuid() == 0
    if need == "chromium" and chromium() is None:
        return False
    path = search_path() if NEEDS[need].daemons else None
    return all(
        os.path.exists(name) if name.startswith("/") else shutil.which(name, path=path) for name in NEEDS[need].names
    )


def require(*needs: str) -> None:
    """Check that all of these keys of NEEDS are there. Raises Missing."""
    if missing := [need for need in needs if not is_installed(need)]:
        raise Missing(missing)


def exit_without(who: str, *needs: str) -> None:
    """Exit with a sentence that says what `who` needs, unless it is there."""
    try:
        require(*needs)
    except Missing as missing:
        sys.exit(f"{who} {missing}")


if __name__ == "__main__":
    if sys.argv[1:]:
        exit_without(*sys.argv[1:])
    else:
        print(*(programs.packages for need, programs in NEEDS.items() if programs.packages and not is_installed(need)))
