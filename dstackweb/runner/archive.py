"""Putting the code that was shipped with a run where its commands will find it."""

from __future__ import annotations

import gzip as gzip  # tarfile imports it when it needs it: too late for a user who may not read Python's own files
import hashlib
import os
import tarfile
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
    """Unpack a tar.gz over what is in the folder. Raises BadArchive, tarfile's errors or OSError."""
    if not hasattr(tarfile, "data_filter"):
        raise BadArchive("this host's Python is too old to do it safely: use 3.9.17, 3.10.12, 3.11.4 or newer")
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:gz") as tar:
        tar.extractall(folder, filter=_replacing)


def _replacing(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """tarfile's own safety; and a file or link that is there already is replaced, not written through or refused."""
    inside = os.path.realpath(folder)
    target = os.path.join(folder, member.name.lstrip("/"))
    parent = os.path.realpath(os.path.dirname(target))
    if os.path.commonpath([parent, inside]) == inside and (os.path.islink(target) or os.path.isfile(target)):
        os.unlink(target)
    return tarfile.data_filter(member, folder)
