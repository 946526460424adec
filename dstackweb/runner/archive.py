"""Putting the code that was shipped with a run where its commands will find it."""

from __future__ import annotations

import hashlib
import os
import tarfile


class BadArchive(Exception):
    """The archive is not what was announced, or would write outside its folder."""


def unpack(path: str, sha256: str, target: str) -> None:
    """Check a tar.gz and unpack it into `target`, over what is there. Raises BadArchive."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise BadArchive("the code that arrived is not the code that was uploaded")
    try:
        with tarfile.open(path, "r:gz") as tar:
            tar.extractall(target, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise BadArchive(f"the code could not be unpacked: {error}") from error


def give(folder: str, uid: int, gid: int) -> None:
    """Make a folder and all in it another user's, without following links out of it."""
    os.chown(folder, uid, gid, follow_symlinks=False)
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(os.path.join(base, name), uid, gid, follow_symlinks=False)
