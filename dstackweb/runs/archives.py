"""Working directories shipped with runs: one tar.gz per content, named by its hash, and kept once per project."""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.db.models import Q, Sum
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import Invalid, TooLarge
from dstackweb.lib.storage import pieces, storage
from dstackweb.runs.models import Archive


def archive_limit() -> int:
    """The largest archive that is accepted, in bytes."""
    return int(settings.DSTACKWEB_ARCHIVE_LIMIT_MB) * 1024 * 1024


def store_archive(project: Project, chunks: Iterable[bytes], sha256: str | None = None) -> tuple[Archive, bool]:
    """Keep an upload; returns it and whether it is new. `sha256` is what the sender says it is.

    Raises TooLarge over the limit or the project's quota, and Invalid when the bytes aren't what was announced; nothing
    is kept then.
    """
    digest, total, limit = hashlib.sha256(), 0, archive_limit()
    with tempfile.NamedTemporaryFile(dir=settings.DSTACKWEB_HOME, prefix=".upload-") as file:
        for chunk in chunks:
            total += len(chunk)
            if total > limit:
                raise TooLarge(
                    _(
                        "the archive is over the limit of %(limit_mb)s MB; nothing was kept. Leave data out with "
                        ".gitignore, or fetch it in the run."
                    )
                    % {"limit_mb": settings.DSTACKWEB_ARCHIVE_LIMIT_MB}
                )
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        actual = digest.hexdigest()
        if sha256 is not None and actual != sha256:
            raise Invalid.at(
                "archive",
                msg=_("the bytes that arrived hash to %(actual)s…: upload it again") % {"actual": actual[:12]},
            )
        if (known := use_archive(project, actual)) is not None:
            return known, False
        _check_quota(project, actual, total)
        key = f"archives/{project.pk}/{actual}-{secrets.token_hex(4)}.tar.gz"
        storage().put(key, Path(file.name))
    if (known := use_archive(project, actual)) is not None:  # another upload of the same was faster
        storage().remove(key)
        return known, False
    try:
        return _keep_archive(project, actual, total, key)
    except TooLarge:
        storage().remove(key)
        raise


def code_size(project: Project, but: str = "") -> int:
    """The bytes of a project's code, without one archive."""
    others = Archive.objects.filter(project=project, removed_at=None).exclude(sha256=but)
    return others.aggregate(total=Sum("size"))["total"] or 0


def _check_quota(project: Project, sha256: str, size: int) -> None:
    """Raises TooLarge if the project's code would take more than its quota with this archive."""
    stored = code_size(project, but=sha256)
    quota_gb = settings.DSTACKWEB_PROJECT_CODE_GB
    if stored + size > quota_gb * 1024**3:
        raise TooLarge(
            _(
                "the code that %(project)s has uploaded takes %(stored)s of %(quota_gb)s GB: nothing was stored. "
                "Code is deleted %(days)s days after its last use; deployment admins can raise the quota "
                "(DSTACKWEB_PROJECT_CODE_GB)"
            )
            % {
                "project": project,
                "stored": f"{stored / 1024**3:.1f}",
                "quota_gb": quota_gb,
                "days": settings.DSTACKWEB_ARCHIVES_DAYS,
            }
        )


def _keep_archive(project: Project, sha256: str, size: int, key: str) -> tuple[Archive, bool]:
    """Use the new file from now on. The one before was being removed, or its bytes are lost.

    Uploads of a project come one after another here: together they must not exceed its quota. Raises TooLarge.
    """
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)
        _check_quota(project, sha256, size)
        archive, made = Archive.objects.get_or_create(
            project=project, sha256=sha256, defaults={"size": size, "key": key}
        )
        Archive.objects.filter(pk=archive.pk).update(used_at=timezone.now(), removed_at=None, key=key)
    if archive.key != key:
        storage().remove(archive.key)
    archive.key = key
    return archive, made or archive.removed_at is not None


def use_archive(project: Project, sha256: str) -> Archive | None:
    """The archive with this hash, marked as used now; None when its bytes are not there, whatever its row says."""
    mine = Archive.objects.filter(project=project, sha256=sha256, removed_at=None)
    archive = mine.first()
    if archive is None or not storage().is_whole(archive.key):
        return None
    return archive if mine.filter(key=archive.key).update(used_at=timezone.now()) else None


def open_archive(archive: Archive) -> Iterator[bytes] | None:
    """Its bytes; None when they are lost."""
    if not storage().is_whole(archive.key):
        return None
    return pieces(storage(), archive.key, 0, archive.size)


def remove_archive(archive: Archive, unused: Q, now: dt.datetime) -> bool:
    """Remove an archive's file if the condition `unused` still holds. Its row stays, and an
    upload of the same content gets a file of its own."""
    if not Archive.objects.filter(unused, pk=archive.pk, removed_at=None, key=archive.key).update(removed_at=now):
        return False
    storage().remove(archive.key)
    return True
