"""Unpacking the code that was uploaded with a run."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from io import BufferedReader


class BadArchive(Exception):
    """The archive is corrupt, or would write outside its folder."""


def unpack(archive: BufferedReader, sha256: str, target: str) -> None:
    """Check a tar.gz and unpack it into `target`, over what is there. Raises BadArchive.

    Files, directories and links that stay inside; of a file's mode only whether its owner may execute it.
    (tarfile's own filters are missing from older releases of each Python.)
    """
    digest = hashlib.sha256()
    while piece := archive.read(1 << 20):
        digest.update(piece)
    if digest.hexdigest() != sha256:
        raise BadArchive("the downloaded code differs from the uploaded code")
    archive.seek(0)
    try:
        with gzip.GzipFile(fileobj=archive) as packed, tarfile.open(fileobj=packed, mode="r:") as tar:
            for member in tar:
                _extract(tar, member, os.path.realpath(target))
    except (tarfile.TarError, zlib.error, OSError, EOFError, KeyError, ValueError) as error:
        raise BadArchive(f"the code could not be unpacked: {error}") from error


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, root: str) -> None:
    folder, name = os.path.split(os.path.normpath(os.path.join(root, member.name)))
    folder = os.path.realpath(folder)
    place = os.path.join(folder, name)
    if not _is_inside(place, root):
        raise BadArchive(f"{member.name} is outside the code's folder")
    if member.isdir():
        os.makedirs(place, exist_ok=True)
        return
    os.makedirs(folder, exist_ok=True)
    if os.path.islink(place) or os.path.isfile(place):
        os.unlink(place)
    if member.issym():
        if not _is_inside(os.path.realpath(os.path.join(folder, member.linkname)), root):
            raise BadArchive(f"the link {member.name} points outside the code's folder")
        os.symlink(member.linkname, place)
        return
    content = tar.extractfile(member) if member.isfile() or member.islnk() else None
    if content is None:
        raise BadArchive(f"{member.name} is neither a file nor a directory nor a link")
    with content, open(place, "xb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
        os.fchmod(file.fileno(), 0o755 if member.mode & 0o100 else 0o644)


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root + os.sep)
