"""Working directories shipped with runs: one tar.gz per content, kept as a file named by its hash."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from django.conf import settings

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import Invalid, TooLarge
from dstackweb.runs.models import Archive


def path(project_id: int, sha256: str) -> Path:
    """Where an archive lies."""
    return Path(settings.DSTACKWEB_HOME) / "archives" / str(project_id) / f"{sha256}.tar.gz"


def limit_bytes() -> int:
    """The largest archive that is taken."""
    return int(settings.DSTACKWEB_ARCHIVE_LIMIT_MB) * 1024 * 1024


def store(project: Project, chunks: Iterable[bytes], sha256: str | None = None) -> tuple[Archive, bool]:
    """Keep an upload; returns it and whether it is new. `sha256` is what the sender says it is.

    Raises TooLarge over the limit and Invalid when the bytes aren't what was announced; nothing is kept then.
    """
    home = path(project.pk, "x").parent
    home.mkdir(parents=True, exist_ok=True)
    digest, total, limit = hashlib.sha256(), 0, limit_bytes()
    with tempfile.NamedTemporaryFile(dir=home, prefix=".upload-", delete=False) as file:
        try:
            for chunk in chunks:
                total += len(chunk)
                if total > limit:
                    raise TooLarge(
                        f"the archive is over the limit of {settings.DSTACKWEB_ARCHIVE_LIMIT_MB} MB; nothing was kept. "
                        "Leave data out with .gitignore, or fetch it in the run."
                    )
                digest.update(chunk)
                file.write(chunk)
            actual = digest.hexdigest()
            if sha256 is not None and actual != sha256:
                raise Invalid.at("archive", msg=f"the bytes that arrived hash to {actual[:12]}…: upload it again")
            os.replace(file.name, path(project.pk, actual))
        except BaseException:
            os.unlink(file.name)
            raise
    return Archive.objects.get_or_create(project=project, sha256=actual, defaults={"size": total})
