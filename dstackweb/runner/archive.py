"""Putting the code that was shipped with a run where its commands will find it."""

from __future__ import annotations

import gzip as gzip  # tarfile imports it when it needs it: too late for a user who may not read Python's own files
import hashlib
import os
import shutil
import tarfile
import zlib
from typing import BinaryIO

from dstackweb.runner.child import Account, CannotStart
from dstackweb.runner.detach import close_all_but
from dstackweb.runner.tree import die_with


class BadArchive(CannotStart):
    """The archive is not what was announced, or can't be unpacked, or would write outside its folder."""


def check(file: BinaryIO, sha256: str) -> None:
    """Raises BadArchive unless the file has this digest."""
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(1 << 20):
        digest.update(piece)
    if digest.hexdigest() != sha256:
        raise BadArchive("the code that arrived is not the code that was uploaded")


def unpack_as(who: Account, file: BinaryIO, folder: str) -> None:
    """`unpack` with the rights of the job's user and no others, in a process of its own. Raises BadArchive.

    The folder is the job's: what an earlier attempt left there, links for instance, must not lead a root process out.
    """
    runner = os.getpid()
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)
        with os.fdopen(read_end, "rb") as answer:
            trouble = answer.read()
        if os.waitpid(pid, 0)[1]:
            raise BadArchive(trouble.decode(errors="replace") or "the process that unpacked the code was killed")
        return
    try:
        close_all_but(write_end, file.fileno())
        if who.switch is not None:
            os.setgroups(who.switch["extra_groups"])
            os.setgid(who.switch["group"])
            os.setuid(who.switch["user"])
        die_with(runner)
        os.umask(0o022)
        unpack(file, folder)
    except BaseException as error:
        os.write(write_end, f"the code could not be unpacked: {error}".encode()[:4096])
        os._exit(1)
    os._exit(0)


def unpack(file: BinaryIO, folder: str) -> None:
    """Unpack a tar.gz over what is in the folder: files, directories, and links that stay inside. Raises BadArchive.

    Of a file's mode only counts whether its owner may execute it. (tarfile's own filters are missing before 3.11.4.)
    """
    root = os.path.realpath(folder)
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:gz") as tar:
            for member in tar:
                _extract(tar, member, root)
    except (tarfile.TarError, zlib.error, OSError, EOFError, KeyError, ValueError) as error:
        raise BadArchive(str(error)) from error


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, root: str) -> None:
    """A file or link that is there already is replaced, not written through or refused."""
    folder, name = os.path.split(os.path.normpath(os.path.join(root, member.name)))
    folder = os.path.realpath(folder)
    place = os.path.join(folder, name)
    if not _is_inside(place, root):
        raise BadArchive(f"{member.name} lies outside the code's folder")
    os.makedirs(folder, exist_ok=True)
    if os.path.islink(place) or os.path.isfile(place):
        os.unlink(place)
    if member.isdir():
        os.makedirs(place, exist_ok=True)
    elif member.issym():
        if not _is_inside(os.path.realpath(os.path.join(folder, member.linkname)), root):
            raise BadArchive(f"the link {member.name} leads out of the code's folder")
        os.symlink(member.linkname, place)
    else:
        content = tar.extractfile(member) if member.isfile() or member.islnk() else None
        if content is None:
            raise BadArchive(f"{member.name} is neither a file nor a directory nor a link")
        with content, open(place, "xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
            os.fchmod(file.fileno(), 0o755 if member.mode & 0o100 else 0o644)


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root + os.sep)
