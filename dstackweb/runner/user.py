"""Touching files as the job's user, so that no link or race in its folders turns the runner's own rights against it."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def acting_as(account: pwd.struct_passwd) -> Iterator[None]:
    """Look at and write files with another user's rights for a moment. Raises PermissionError unless root."""
    if account.pw_uid == os.geteuid():
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(os.getgrouplist(account.pw_name, account.pw_gid))
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(os.getuid())
        os.setegid(gid)
        os.setgroups(groups)
